"""The copy benchmark runs at a small size, and refuses to give a number for wrong bytes. No timing is judged here."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu


def test_every_case_gives_a_number() -> None:
    from hisparse.bench import copies

    facts, rows = copies.run(quick=True)
    cases = {row.case for row in rows}
    assert {"append 16 x 656 B, mirrored", "append 1 x 1152 B, mirrored", "spill 16 pages", "restore 16 pages, CPU",
            "scatter 16 grouped pages to host and device", "gather 16 pages of one layer"} <= cases
    assert facts["hardware"] and all(row.value > 0 and row.unit and row.bar is None for row in rows)


def test_wrong_bytes_are_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    from hisparse.bench.data_plane import pages
    from hisparse.ops.cuda.pages import PageCopier

    monkeypatch.setattr(PageCopier, "spill", lambda self, pages: None)
    with pytest.raises(AssertionError, match="spill 16 pages: wrong bytes"):
        pages.measure(quick=True)
