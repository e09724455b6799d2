"""`docs/invariants.md` lists every seeded fault once, and names code and tests that exist."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import hisparse.cache
from tests.mutations.faults import FAULTS
from tests.mutations.pd_faults import PD_FAULTS

ROOT = Path(__file__).parents[2]
ROWS = [[cell.strip() for cell in line.strip("|\n").split("|")]
        for line in (ROOT / "docs" / "invariants.md").read_text().splitlines() if line.startswith("| ")]
NAMES: dict[str, object] = {}
for info in pkgutil.iter_modules(hisparse.cache.__path__):
    module = importlib.import_module(f"hisparse.cache.{info.name}")
    NAMES |= {name: value for name, value in vars(module).items() if isinstance(value, type)} | {info.name: module}


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_fault_is_in_the_table_once() -> None:
    listed = [name for row in ROWS if len(row) == 4 for name in quoted(row[2])]
    assert sorted(listed) == sorted(fault.__name__ for fault in FAULTS)


@pytest.mark.parametrize("place", sorted({name for row in ROWS for name in quoted(row[1])}))
def test_what_enforces_it_exists(place: str) -> None:
    owner, _, attribute = place.partition(".")
    assert owner in NAMES, f"{owner} is in no module of hisparse.cache"
    assert not attribute or hasattr(NAMES[owner], attribute), f"{owner} has no {attribute}"


@pytest.mark.parametrize("path", sorted({name for row in ROWS if len(row) == 3 for name in quoted(row[2])}))
def test_the_tests_named_exist(path: str) -> None:
    assert (ROOT / path).is_file() or (ROOT / "tests" / "cache" / path).is_file()


def test_prefill_decode_faults_are_in_their_table_once() -> None:
    text = (ROOT / "docs" / "pd.md").read_text()
    rows = re.findall(r"^\| (.+) \| `(\w+)` \| .+ \|$", text, re.MULTILINE)
    assert rows == [((fault.__doc__ or "").rstrip("."), fault.__name__) for fault in PD_FAULTS]
