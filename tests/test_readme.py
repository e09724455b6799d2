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


def test_the_table_of_parts_is_whole() -> None:
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    table = [path for row in re.findall(r"^\| (`.+?) \|", architecture, re.M) for path in re.findall(r"`([^`]+/)`", row)]
    packages = {f"hisparse/{path.name}/" for path in (ROOT / "hisparse").iterdir() if (path / "__init__.py").is_file()}
    assert packages <= set(table), f"the table of docs/architecture.md lacks {sorted(packages - set(table))}"
    for path in table:
        assert (ROOT / path).exists(), path


def test_the_plan_shown_is_the_plan_printed() -> None:
    shown = re.search(r"```\n\$ hisparse (plan .*)\n((?:.|\n)*?)```", (ROOT / "docs" / "planning.md").read_text())
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


def measured() -> list[tuple[str, Path]]:
    """What README says of each row of its table that names a results file, and that file."""
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| [^|]*\[results\]\(([^)]+)\) \|$", README, re.M)
    return [(result, ROOT / path) for result, path in rows]


@pytest.mark.parametrize(("result", "path"), measured(), ids=lambda value: value.stem if isinstance(value, Path) else value)
def test_measured_numbers_are_those_of_the_results(result: str, path: Path) -> None:
    in_file = {float(number.replace(",", "")) for number in re.findall(r"-?\d[\d,]*\.?\d*", path.read_text())}
    for text in re.findall(r"[-+]?\d+\.?\d*", result):
        value, digits = float(text), len(text.partition(".")[2])
        same = {round(number, digits) for number in in_file} | {round(100 * number, digits) for number in in_file}
        assert value in same, f"README says {text}, which is not in {path.name}"


def test_readme_fits_a_few_screens() -> None:
    assert len(README.splitlines()) <= 100 and len(measured()) >= 5
