from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hisparse.actors import handles
from hisparse.actors.engine import EngineIdentity
from hisparse.actors.placement import ACTOR_CPUS, HEAD_CPUS, Placement, bundles
from hisparse.config import HiSparseConfig, load_config
from hisparse.errors import ConfigError


def config(ranks: int = 1, **model: object) -> HiSparseConfig:
    return load_config({"model": {"path": "recall", **model}, "tensor_parallel_size": ranks}, environ={})


def test_two_engines_of_several_ranks_fit_on_two_cores() -> None:
    assert 2 * sum(bundle["CPU"] for bundle in bundles(config(8))) <= 2.0
    assert len(bundles(config(4))) == 5 and 2 * ACTOR_CPUS <= HEAD_CPUS


def test_each_rank_on_cuda_gets_a_gpu_or_its_share_of_one() -> None:
    assert all("GPU" not in bundle for bundle in bundles(config(2)))
    assert [bundle.get("GPU") for bundle in bundles(config(2, device="cuda"))] == [None, 1.0, 1.0]
    assert [bundle.get("GPU") for bundle in bundles(config(1, device="cuda", gpu_share=0.5))] == [None, 0.5]


def test_b39_the_given_group_is_used_and_none_is_nested(monkeypatch: pytest.MonkeyPatch) -> None:
    given = SimpleNamespace(bundle_specs=bundles(config(2)))
    monkeypatch.setattr(handles, "current_placement", lambda: given)
    monkeypatch.setattr(handles, "create_placement", lambda *a, **k: pytest.fail("a nested group"))
    removed: list[Any] = []
    monkeypatch.setattr(handles, "remove_placement", removed.append)
    placement = Placement.acquire(config(2), timeout_s=1.0)
    assert placement.group is given and [placement.rank_bundle(rank) for rank in (0, 1)] == [1, 2]
    placement.release()
    assert removed == []
    with pytest.raises(ConfigError, match="has 3 bundles, tensor_parallel_size = 4 needs 5"):
        Placement.acquire(config(4), timeout_s=1.0)


def test_outside_a_replica_a_group_is_made_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[Any] = []
    monkeypatch.setattr(handles, "current_placement", lambda: None)
    monkeypatch.setattr(handles, "create_placement", lambda wanted, timeout_s: ("group", len(wanted), timeout_s))
    monkeypatch.setattr(handles, "remove_placement", removed.append)
    placement = Placement.acquire(config(2), timeout_s=7.0)
    assert placement.group == ("group", 3, 7.0)
    placement.release()
    assert removed == [placement.group]


def test_b39_identities_are_distinct() -> None:
    identities = [EngineIdentity.new(role) for role in ("prefill", "decode") for _ in range(200)]
    assert len({identity.engine_id for identity in identities}) == 400
    assert len({identity.incarnation for identity in identities}) == 400
    assert all(0 <= identity.incarnation < 2**64 for identity in identities)
