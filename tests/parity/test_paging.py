"""Prefill and decode with other pages than each other: tokens are those of unmodified transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hisparse.types import Landing
from tests.parity.cells import never_fits_resident
from tests.parity.rig import Rig, engine_config, prompt_of

TOKENS = 12
LENGTHS = (1, 15, 64, 97, 130)


@pytest.mark.parametrize(("prefill", "decode", "landing"), [
    ({"block_size": 8}, {"block_size": 16}, Landing.HOST), ({"block_size": 32}, {"block_size": 8}, Landing.HOST),
    ({"block_size": 32}, {"block_size": 8}, Landing.RESIDENT),
    ({"block_size": 4, "num_groups": 1}, {"block_size": 64}, Landing.RESIDENT),
    ({"num_groups": 1}, {"num_groups": 2}, Landing.HOST)],
    ids=["smaller host", "larger host", "larger resident", "smallest and other groups", "other groups"])
def test_imports_of_other_pages_give_the_same_tokens(
        make_rig: Callable[..., Rig], tiny_checkpoints: dict[str, Path], prefill: dict[str, Any], decode: dict[str, Any],
        landing: Landing) -> None:
    path = tiny_checkpoints["glm52"]
    rig = make_rig(engine_config(path, "decode", cache=decode), engine_config(path, "prefill", cache=prefill))
    if landing is Landing.HOST:
        never_fits_resident(rig.decode)
    for length in LENGTHS:
        rig.put(f"p{length}", prompt_of(length, length), TOKENS)
    rig.put("again", prompt_of(97, 97)[:64] + prompt_of(50, 7), TOKENS)  # its first pages may be here already
    rig.run()
    rig.check(*(f"p{length}" for length in LENGTHS), "again")
    stats = rig.decode.pd.stats()
    assert stats.imports_ok == len(LENGTHS) + 1 and not stats.imports_failed
    for length in LENGTHS:
        assert rig.answer(f"p{length}").stats.imported_tokens == length
        assert rig.answer(f"p{length}").stats.landing is landing
