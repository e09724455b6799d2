"""PNG of an SVG, by whichever of a few well-known programs is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from hisparse.errors import HiSparseError

SCALE = 2
"""Pixels for each unit of the chart."""
TIMEOUT_S = 60.0


def _browser(program: str, source: Path, target: Path, width: int, height: int) -> list[str]:
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to run as root with one
    return [program, "--headless", *sandbox, "--disable-gpu", "--hide-scrollbars", f"--force-device-scale-factor={SCALE}",
            f"--window-size={width},{height}", f"--screenshot={target}", source.as_uri()]


PROGRAMS: dict[str, Callable[[str, Path, Path, int, int], list[str]]] = {
    "rsvg-convert": lambda program, source, target, width, height: [program, "-z", str(SCALE), "-o", str(target), str(source)],
    "resvg": lambda program, source, target, width, height: [program, "--zoom", str(SCALE), str(source), str(target)],
    "inkscape": lambda program, source, target, width, height: [
        program, str(source), "--export-type=png", f"--export-filename={target}", f"--export-width={SCALE * width}"],
    "chromium": _browser, "chromium-browser": _browser, "google-chrome": _browser,
}


def converter() -> str | None:
    """Name of the first program that is installed."""
    return next((name for name in PROGRAMS if shutil.which(name)), None)


def convert(svg: str, target: Path, *, width: int, height: int) -> None:
    """Writes the picture.

    Args:
        width, height: of the chart, in its units.
    Raises:
        HiSparseError: no program, or it failed; with its words.
    """
    name = converter()
    if name is None:
        raise HiSparseError(f"none of {', '.join(PROGRAMS)} is installed, one of which makes a PNG of a chart; install "
                            "one, or write an .svg")
    with tempfile.TemporaryDirectory(prefix="hisparse-chart-") as folder:
        source, made = Path(folder) / "chart.svg", Path(folder) / "chart.png"
        source.write_text(svg)
        command = PROGRAMS[name](str(shutil.which(name)), source, made, width, height)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise HiSparseError(f"{name} made no picture within {TIMEOUT_S:g} s; write an .svg instead") from error
        if done.returncode or not made.is_file():
            said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise HiSparseError(f"{name} made no picture: {said}; write an .svg instead")
        shutil.copyfile(made, target)
