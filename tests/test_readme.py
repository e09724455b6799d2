"""The README's commands and paths are real."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hisparse.checkpoints import recall_checkpoint

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    lines = [line for block in re.findall(r"```bash\n(.*?)```", README, re.S) for line in block.splitlines()]
    return [line.split("#")[0].strip() for line in lines if line.strip()]


def test_the_two_commands_are_there() -> None:
    assert commands()[:2] == ["./demo", "./test"]
    for name in ("demo", "test", ".ci/run", "scripts/bootstrap.sh"):
        assert os.access(ROOT / name, os.X_OK), name


@pytest.mark.parametrize("command", [line for line in commands() if "hisparse serve" in line])
def test_serve_commands_resolve(command: str) -> None:
    arguments = command.replace("/path/to/checkpoint", str(recall_checkpoint())).split()[1:]
    if "--dry-run" not in arguments:
        arguments.append("--dry-run")
    result = subprocess.run([sys.executable, "-m", "hisparse.cli", *arguments], cwd=ROOT, capture_output=True, text=True,
                            timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "memory plan" in result.stdout


def test_the_demo_has_help() -> None:
    result = subprocess.run([sys.executable, "-m", "hisparse.cli", "demo", "--help"], cwd=ROOT, capture_output=True,
                            text=True, timeout=120, check=False)
    assert result.returncode == 0 and "--keep" in result.stdout, result.stderr


def test_links_and_paths_exist() -> None:
    links = re.findall(r"\]\(((?!http)[^)]+)\)", README)
    table = [path for row in re.findall(r"^\| (`.+?) \|", README, re.M) for path in re.findall(r"`([^`]+/)`", row)]
    assert links and table
    for path in [*links, *table]:
        assert (ROOT / path).exists(), path


def test_the_plan_shown_is_the_plan_printed() -> None:
    shown = re.search(r"```\n\$ hisparse (plan .*)\n((?:.|\n)*?)```", README)
    assert shown is not None
    result = subprocess.run([sys.executable, "-m", "hisparse.cli", *shown[1].split()], cwd=ROOT, capture_output=True, text=True,
                            timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert [line.rstrip() for line in result.stdout.splitlines()] == shown[2].splitlines()


@pytest.mark.parametrize("command", [line for line in commands() if re.search("hisparse (plan|doctor|trace|bench)", line)])
def test_other_commands_exist(command: str) -> None:
    arguments = [word for word in command.split()[1:] if not word.startswith("deploy/")]
    result = subprocess.run([sys.executable, "-m", "hisparse.cli", *arguments, "--help"], cwd=ROOT, capture_output=True,
                            text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
