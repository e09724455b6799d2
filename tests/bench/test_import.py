"""The import benchmark runs, and compares the bytes before it gives a number. No timing is judged here."""

from __future__ import annotations

import pytest

from hisparse.bench import pd_import
from hisparse.bench.imports.engines import Engine
from hisparse.errors import ConfigError


def test_every_path_gives_a_number() -> None:
    for word, count in (("loopback", 4), ("none", 5)):
        facts, rows = pd_import.run(quick=True, repeats=1, only=("tiny", word))
        assert len(rows) == count and facts["bench"] == "import"
        assert all(row.value > 0 and row.unit in ("GB/s", "us/page") and row.bar is None for row in rows), rows


def test_wrong_bytes_give_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(self: Engine) -> None:
        fill(self)
        self.cache.bytes[:, 40] ^= 1
        self.pool.rows(0)[:, 1] += 1

    fill = Engine.fill
    monkeypatch.setattr(Engine, "fill", spoilt)
    with pytest.raises(AssertionError, match="pages .*are wrong"):
        pd_import.run(quick=True, repeats=1, only=("tiny", "loopback", "staged"))


def test_words_of_no_case_are_refused() -> None:
    with pytest.raises(ConfigError, match="no case's name has 'tiny' and 'moon'; names are like 'bytes tiny"):
        pd_import.run(only=("tiny", "moon"))
