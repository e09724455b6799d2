"""Imports point only downward, and each foreign system has one door."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "hisparse"
LAYERS = [
    "cli", "doctor", "serve", "actors", "pd", "engine", "connector", "embedding", "worker", "capacity", "cache", "trace", "ops",
    "telemetry", "metrics", "config", "layout", "types", "errors",
]
RANK = {name: len(LAYERS) - i for i, name in enumerate(LAYERS)}
LEAF = {"checkpoints", "testing", "demo", "bench"}
"""checkpoints: data. testing, demo and bench: tools on top of everything, which no layer imports (checkpoints may be)."""
DOORS = {
    "ray": ("actors/handles.py", "serve/", "metrics/ray_sink.py"),
    "nixl": ("pd/nixl.py",),
    "nixl_cu13": ("pd/nixl.py",),
    "cupy": ("ops/",),
    "transformers": ("engine/models/", "testing/", "demo/", "bench/"),
    "fastapi": ("serve/",),
    "typer": ("cli/", "demo/"),
    "opentelemetry": ("telemetry/otel.py",),
}
NO_TORCH = ("cache/", "metrics/", "telemetry/", "connector/base.py", "types/", "config/", "layout/", "errors.py")


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: use absolute imports"
            found.append((node.module or "", node.lineno))
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def part(name: str) -> str | None:
    pieces = name.split(".")
    return pieces[1] if pieces[0] == "hisparse" and len(pieces) > 1 else None


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downward(path: Path) -> None:
    relative = path.relative_to(ROOT)
    here = relative.parts[0].removesuffix(".py")
    for name, line in imported(path):
        there = part(name)
        if there is None or there == here or there not in RANK | dict.fromkeys(LEAF, 0):
            continue
        where = f"{relative}:{line} imports {name}"
        if there in LEAF:
            assert there == "checkpoints" or here in LEAF or here == "cli", where
        elif here in RANK:
            assert RANK[there] < RANK[here], f"{where}: {here} may import only {LAYERS[LAYERS.index(here) + 1:]}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_foreign_systems_have_one_door(path: Path) -> None:
    relative = str(path.relative_to(ROOT))
    for name, line in imported(path):
        top = name.split(".")[0]
        if top in DOORS:
            assert relative.startswith(DOORS[top]), f"{relative}:{line}: {top} is imported only in {DOORS[top]}"
        if top == "torch":
            assert not relative.startswith(NO_TORCH), f"{relative}:{line}: no torch here"


def test_the_rules_see_a_violation(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import ray\nfrom hisparse.engine import core\n")
    names = [name for name, _ in imported(bad)]
    assert "ray" in names and "hisparse.engine.core" in names
    assert part("hisparse.engine.core") == "engine" and RANK["engine"] > RANK["cache"]
