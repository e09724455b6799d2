"""What goes wrong between prefill and decode, and the states it happens in; for the tests of failures."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from hisparse.engine.request import RequestState
from hisparse.pd.loopback import DEFAULT_NETWORK
from tests.parity.rig import Rig, greedy, prompt_of

TOKENS = 12
MakePair = Callable[..., Rig]
Tamper = Callable[[Mapping[str, Any]], Any]


def reuse_prefill_pages(rig: Rig, name: str) -> None:
    """Ends the lease of `name` and runs other prompts until its pages are handed out again."""
    assert rig.prefill is not None
    rig.prefill.core.abort(name)
    for i in range(6):
        rig.prefill.generate([prompt_of(250, 9000 + i)], greedy(1))


def fail_reads(rig: Rig) -> None:
    rig.faults.fail = lambda number: number == 0


def hang_reads(rig: Rig) -> None:
    rig.faults.hang = lambda number: number == 0


def move_nothing(rig: Rig) -> None:
    rig.faults.silent = lambda number: True


def kill_prefill(rig: Rig) -> None:
    assert rig.prefill is not None
    DEFAULT_NETWORK.kill(rig.prefill.executor.handshakes[0].agent)


def reuse_before_reading(rig: Rig) -> None:
    def tamper(name: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        rig.tamper = None
        reuse_prefill_pages(rig, name)
        return params

    rig.tamper = tamper


def expire_before_reading(rig: Rig) -> None:
    def tamper(name: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        rig.tamper = None
        assert rig.prefill is not None
        rig.prefill.run_until(lambda: not rig.prefill.core.stats().held)
        assert rig.prefill.pd.stats().leases_expired == 1
        reuse_prefill_pages(rig, name)
        return params

    rig.tamper = tamper


def reuse_while_reading(rig: Rig) -> None:
    """The READs hang until the pages belong to somebody else; then they complete with the wrong bytes."""
    hang = [True]
    rig.faults.hang = lambda number: hang[0]

    def watch() -> None:
        request = rig.decode.core.requests.get("victim")
        if hang[0] and request is not None and request.state is RequestState.LOADING:
            reuse_prefill_pages(rig, "victim")
            hang[0] = False

    rig.watch = watch


FAILURES: dict[str, tuple[Callable[[Rig], None], str]] = {
    "transfer": (fail_reads, "transfer"), "hang": (hang_reads, "timeout"), "silent": (move_nothing, "generation"),
    "peer_gone": (kill_prefill, "refused"), "reused_before": (reuse_before_reading, "generation"),
    "expired_before": (expire_before_reading, "generation"), "reused_meanwhile": (reuse_while_reading, "generation"),
}


def evict_indexer_pages(rig: Rig) -> None:
    """Runs "first", then others until its indexer pages are only in the store and its KV pages only on the host."""
    rig.put("first", prompt_of(130, 50), 4)
    rig.run()
    for i in range(5):
        rig.put(f"filler{i}", prompt_of(260, 60 + i), 4)
        rig.run()
    core = rig.decode.core
    core.cache.open("probe", rig.served["first"].prompt, max_tokens=4)
    hit = core.cache.prefix("probe")
    core.cache.close("probe")
    assert hit.indexer_load_pages > 0, f"the indexer pages are still on the GPU: {hit}"




def changed(path: tuple[str, ...], change: Callable[[Any], Any]) -> Tamper:
    def tamper(params: Mapping[str, Any]) -> Any:
        out: Any = copy.deepcopy(dict(params))
        node = out
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = change(node[path[-1]])
        return out

    return tamper
