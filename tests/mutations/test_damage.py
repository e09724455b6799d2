"""`check()` must notice every kind of damage to the state, and name it."""

from __future__ import annotations

import pytest

from hisparse.cache.residency import PageState
from hisparse.errors import InvariantError
from hisparse.types import Landing
from tests.cache.harness import Harness
from tests.mutations.damage import DAMAGES, Damage


def rich_state() -> Harness:
    """Pages in every state, a grown hot region, copies under way and an import pending, all of it right."""
    h = Harness(device_blocks=120, host_blocks=60, max_model_len=64, groups=2, seats=4, hot_rows_max=24, watermark=0.05)
    h.add("old", list(range(30)), 1)
    h.run()
    h.admit(h.add("far", [100 + i for i in range(40)], 20), Landing.HOST, 40)
    h.admit(h.add("hit", [*range(30), 7, 8], 4))
    h.step()
    h.step()
    h.complete_each_step = False
    h.add("new", [200 + i for i in range(20)], 9)
    for _ in range(3):
        h.step()
    for worker in h.workers:
        worker.complete(next(iter(worker.copies)))
    h.manager.on_worker_output(h.outputs())
    h.admit(h.add("import", [300 + i for i in range(14)], 4), Landing.HOST, 14)
    h.dispatch([])
    h.manager.check()
    seen = {view.state for request_id in h.reqs for view in h.manager.page_views(request_id)}
    assert seen == set(PageState) - {PageState.NONE} and h.manager.stats().hot_blocks_elastic
    return h


@pytest.mark.parametrize(("damage", "words"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_damage_is_noticed(damage: Damage, words: str) -> None:
    h = rich_state()
    damage(h.manager)
    with pytest.raises(InvariantError, match=words):
        h.manager.check()
