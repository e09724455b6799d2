"""The example of docs/embedding.md on a GPU: the same code, another device."""

from __future__ import annotations

import pytest

from tests.test_embedding import load_example

pytestmark = pytest.mark.gpu


def test_the_example_reads_back_what_it_wrote_from_every_tier() -> None:
    rows, pages = load_example().main("cuda")
    assert rows.resident_rows and rows.hot_rows and rows.miss_rows and rows.prefill_host_rows
    assert rows.spilled_pages and rows.mirrored_rows
    assert pages.hot_required and pages.pages_reused
