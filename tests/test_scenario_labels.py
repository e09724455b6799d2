"""Every reported failure of other systems that has a label is a test of that name, of which the suite has at least one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

LABELS = {
    "HiSparse itself": (1, 3, 5, 6, 8, 9),
    "kernels and graph capture": (12, 14),
    "offload: stale rows, lifetimes, hashes": (17, 18, 19, 20, 23),
    "ranks and scheduler": (24, 26),
    "prefill/decode transfers": (27, 28, 30, 31, 34),
    "pinned and shared memory": (36, 37, 38),
    "Ray and Kubernetes": (39, 40),
}


@pytest.fixture(scope="module")
def tests() -> set[str]:
    files = Path(__file__).parent.rglob("test_*.py")
    return {node.name for file in files for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("label", [label for labels in LABELS.values() for label in labels])
def test_a_label_is_a_test(tests: set[str], label: int) -> None:
    assert any(name.startswith(f"test_b{label:02}_") for name in tests), f"no test is named after B{label:02}"
