"""Events that alerts are made of, driven in running engines and counted by hand: each must reach its metric, once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hisparse.engine.request import RequestState
from hisparse.metrics import CATALOGUE, EngineFeed, MemorySink
from tests.parity.cells import never_fits_resident
from tests.parity.failures import TOKENS, expire_before_reading
from tests.parity.rig import Rig, engine_config, greedy, prompt_of

MakeRig = Callable[..., Rig]
BY_NAME = {metric.name: metric for metric in CATALOGUE}


class Watched:
    """What Prometheus would be told of a rig's engines."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.sink = rig, MemorySink()
        self._feeds = [(EngineFeed(self.sink, **self.labels(engine.core.config.pd.role)), engine) for engine in rig.engines]

    def labels(self, role: str) -> dict[str, str]:
        return {"model": "m", "role": role, "engine": role}

    def value(self, name: str, role: str = "decode", **own: str) -> float | None:
        for feed, engine in self._feeds:
            feed.update(engine.core.stats().asdict())
        return self.sink.value(BY_NAME[f"hisparse_{name}"], **self.labels(role), **own)


def test_landings_failures_and_expiries(make_rig: MakeRig, tiny_checkpoints: dict[str, Path]) -> None:
    path, pd = tiny_checkpoints["glm52"], {"lease_s": 0.3, "transfer_deadline_s": 0.5}
    rig = make_rig(engine_config(path, "decode", pd=pd, slack=None),
                   engine_config(path, "prefill", pd=pd, slack=30, host_pages=30))
    seen = Watched(rig)

    def serve(name: str, tokens: int) -> None:
        rig.put(name, prompt_of(tokens, len(rig.served)), TOKENS)
        rig.until(lambda: rig.ended(name))

    def failures() -> dict[str, float | None]:
        return {reason: count for reason in ("refused", "timeout", "transfer", "generation", "cancelled", "restarted")
                if (count := seen.value("import_failures", reason=reason))}

    assert failures() == {} and seen.value("lease_expiries", "prefill") == 0
    serve("resident", 70)
    assert (seen.value("landings", landing="resident"), seen.value("landings", landing="host")) == (1, 0)
    assert (seen.value("imports"), seen.value("leases_granted", "prefill")) == (1, 1)
    assert seen.value("import_bytes") and seen.value("import_seconds")

    expire_before_reading(rig)
    serve("too late", 150)
    assert failures() == {"generation": 1} and seen.value("lease_expiries", "prefill") == 1
    assert seen.value("local_prefill_tokens") == 150, "computed again on decode"

    rig.faults.fail = lambda number: True
    serve("unreachable", 90)
    rig.faults.fail = lambda number: False
    assert failures() == {"generation": 1, "transfer": 1} and seen.value("local_prefill_tokens") == 240

    rig.faults.hang = lambda number: True
    rig.put("leaves", prompt_of(60, 99), TOKENS)
    rig.until(lambda: (request := rig.decode.core.requests.get("leaves")) is not None
              and request.state is RequestState.LOADING)
    assert seen.value("imports_in_flight") == 1 and seen.value("requests", state="loading") == 1
    rig.abort("leaves")
    rig.until(lambda: not rig.decode.core.has_work())  # at the import's deadline nothing can write any more
    rig.faults.hang = lambda number: False
    assert failures() == {"generation": 1, "transfer": 1, "cancelled": 1} and seen.value("imports_in_flight") == 0

    never_fits_resident(rig.decode)
    serve("host", 200)
    assert (seen.value("landings", landing="resident"), seen.value("landings", landing="host")) == (4, 1)
    rig.drain()
    rig.check("resident", "too late", "unreachable", "host")
    assert seen.value("leases_held", "prefill") == 0 and seen.value("lease_expiries", "prefill") == 1


def test_preemptions_spills_and_rows_by_index_group(make_rig: MakeRig, tiny_checkpoints: dict[str, Path]) -> None:
    """A device pool with little room beyond one request: the others lose their blocks and read from the host."""
    rig = make_rig(engine_config(tiny_checkpoints["glm52"], slack=0))
    seen, core = Watched(rig), rig.decode.core
    preempted: list[str] = []
    inner = core.scheduler.preempt

    def count(request: object) -> None:
        preempted.append(request.request_id)  # type: ignore[attr-defined]
        inner(request)  # type: ignore[arg-type]

    core.scheduler.preempt = count  # type: ignore[method-assign, assignment]
    for i in range(3):
        rig.put(f"r{i}", prompt_of(100 + 16 * i, i), 60)
    rig.run()
    assert len(preempted) > 0 and seen.value("preemptions", "colocated") == len(preempted)
    assert seen.value("admissions", "colocated") == 3 + len(preempted)
    assert seen.value("generated_tokens", "colocated") == 3 * 60
    cache = core.stats().cache
    assert seen.value("spills", "colocated", outcome="completed") == cache["spills_planned"] > 0
    assert seen.value("spill_seconds", "colocated") and seen.value("pending_spills", "colocated") == 0
    groups = core.layout.shape.index_groups
    by_request = [rig.answer(f"r{i}").stats for i in range(3)]
    for tier, field in (("resident", "resident_rows"), ("hot", "hot_rows"), ("miss", "miss_rows"),
                        ("prefill_host", "prefill_host_rows")):
        total = sum(seen.value("index_group_rows", "colocated", index_group=str(i), tier=tier) or 0
                    for i in range(len(groups)))
        assert total == sum(getattr(stats.resolve, field) for stats in by_request if stats is not None), tier
        assert total > 0 or tier == "prefill_host"


def test_selected_rows_of_each_index_group(make_rig: MakeRig, tiny_checkpoints: dict[str, Path]) -> None:
    """Without pressure each row selects min(top_k, context) positions in every layer, all resident: an exact sum."""
    rig = make_rig(engine_config(tiny_checkpoints["glm52"], cache={"prefix_cache": False}))
    seen = Watched(rig)
    shape, lengths, new = rig.decode.core.layout.shape, (5, 40), 7
    rig.decode.generate([prompt_of(n, n) for n in lengths], greedy(new))
    # The last token is sampled and never run.
    rows = sum(min(shape.top_k, position + 1) for n in lengths for position in range(n + new - 1))
    for i, group in enumerate(shape.index_groups):
        values = [seen.value("index_group_rows", "colocated", index_group=str(i), tier=tier)
                  for tier in ("resident", "hot", "miss", "prefill_host")]
        assert values == [rows * len(group.layers), 0, 0, 0], i
