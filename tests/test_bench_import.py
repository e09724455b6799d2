"""The import benchmark runs, and compares the bytes before it gives a number. No timing is judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hisparse.bench import pd_import as bench_import
from hisparse.bench.imports.engines import Engine


def test_every_path_gives_a_number(tmp_path: Path) -> None:
    path = tmp_path / "import.jsonl"
    for words in (["loopback"], ["none"]):
        only = [argument for word in ("tiny", *words) for argument in ("--only", word)]
        assert bench_import.main(["--quick", "--repeats", "1", *only, "--check", "--json", str(path)]) == 0
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == {"loopback": 4, "none": 5}[words[0]]
        assert all(row["value"] > 0 and row["unit"] in ("GB/s", "us/page") and row["bar"] is None for row in rows), rows


def test_wrong_bytes_give_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(self: Engine) -> None:
        fill(self)
        self.cache.bytes[:, 40] ^= 1
        self.pool.rows(0)[:, 1] += 1

    fill = Engine.fill
    monkeypatch.setattr(Engine, "fill", spoilt)
    with pytest.raises(AssertionError, match="pages .*are wrong"):
        bench_import.main(["--quick", "--repeats", "1", "--only", "tiny", "--only", "loopback", "--only", "staged"])
