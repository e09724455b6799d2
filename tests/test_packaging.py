"""The wheel has everything a user needs: package data, kernel sources, licence."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_wheel_ships_checkpoint_and_kernel_sources(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("hisparse", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "hisparse").rglob("*.py")}
    assert modules <= names, modules - names
    assert {f"hisparse/checkpoints/recall/{name}" for name in ("model.safetensors", "config.json", "tokenizer.json")} <= names
    assert "hisparse/serve/residency/page.html" in names
    shipped = {name.rpartition("share/hisparse/kernels/")[2] for name in names if "share/hisparse/kernels/" in name}
    assert shipped == {path.name for path in (ROOT / "kernels").iterdir()}
    assert not any(name.startswith(("tests/", "kernels/", "scripts/")) for name in names)
    assert "hisparse/py.typed" in names and wheel.stat().st_size < 10 << 20
