"""Commands of docs/quickstart.md, by who runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
URL = "http://127.0.0.1:8000"
RULES = (
    (r"scripts/bootstrap\.sh|export PATH=", "install"),
    (r"hisparse serve \S+\.yaml$", "start"),
    (r"hisparse (status|bench serve)|curl ", "client"),
    (r"hisparse ", "here"),
)
"""install: was run before any test. start: tests/integration/test_cli_serve.py. client: tests/integration/test_serve.py,
against a service. here: tests/test_quickstart.py."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / "quickstart.md").read_text(), re.S)


def commands(kind: str) -> list[str]:
    return [line for line in _lines() if _kind(line) == kind]


def _lines() -> list[str]:
    return [line for block in blocks("bash") for line in block.splitlines() if line.strip()]


def _kind(line: str) -> str:
    kind = next((kind for pattern, kind in RULES if re.match(pattern, line)), None)
    assert kind is not None, f"nobody runs this command of docs/quickstart.md: {line}"
    return kind


def shell(command: str) -> list[str]:
    """Arguments that run the command line as a user's shell does, with this interpreter's hisparse."""
    return ["bash", "-c", f'hisparse() {{ "{sys.executable}" -m hisparse.cli "$@"; }}\n{command}']


def run_client(command: str, url: str) -> str:
    """What the command prints when the service listens at `url`. It must succeed."""
    here = command.replace(URL, url).replace("hisparse status", f"hisparse status --url {url}")
    done = subprocess.run(shell(here), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{here}: {done.stdout}{done.stderr}"
    return done.stdout
