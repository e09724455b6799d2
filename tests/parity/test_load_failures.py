"""The failure policy, whatever made an import fail: asked again, computed here within the budget, or refused.

Oracle: unmodified transformers. Each way to fail meets the budget when it is full and when there is room, and retries that find
the next answer, or none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hisparse.engine.load_failures import Recovery
from hisparse.errors import RequestError
from hisparse.pd import worker as pd_worker
from hisparse.pd.loopback import DEFAULT_NETWORK, LoopbackTransport
from hisparse.types import FinishReason
from tests.mutations import load_faults
from tests.mutations.faults import Fault
from tests.parity.failures import FAILURES, changed
from tests.parity.rig import Rig, Served, check_tokens, engine_config, greedy, prompt_of

TOKENS, PROMPT = 6, 150
PATIENCE_S = 60.0
MakeRig = Callable[..., Rig]


@pytest.fixture
def pair(make_rig: MakeRig, tiny_checkpoints: dict[str, Path]) -> MakeRig:
    def make(failure: str = "", **pd: Any) -> Rig:
        pd |= {"transfer_deadline_s": 0.3 if failure in ("hang", "blocked") else 20.0,
               "lease_s": {"expired_before": 0.2, "peer_gone": 1.0, "answer_refused": 1.0}.get(failure, 30.0)}
        path = tiny_checkpoints["glm52"]
        return make_rig(engine_config(path, "decode", pd=pd), engine_config(path, "prefill", pd=pd, slack=30, host_pages=30))

    return make


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], None]]]:
    """What lets blocked calls go on, at the end at the latest."""
    monkeypatch.setattr(pd_worker, "DRAIN_S", 0.1)
    monkeypatch.setattr(pd_worker, "CLOSE_S", 0.1)
    waiting: list[Callable[[], None]] = []
    yield waiting
    for go_on in waiting:
        go_on()


def block(rig: Rig, release: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode rank's first READ does not come back."""
    gate, read = threading.Event(), LoopbackTransport.read
    ours = DEFAULT_NETWORK.agents[rig.decode.executor.handshakes[0].agent]
    release.append(gate.set)

    def wait(self: LoopbackTransport, *args: Any) -> Any:
        if self is ours:
            assert gate.wait(60)
        return read(self, *args)

    monkeypatch.setattr(LoopbackTransport, "read", wait)


def refuse_answers(rig: Rig) -> None:
    """The first answer is of another layout."""
    spoil = changed(("fingerprint",), lambda value: "0" * len(value))

    def tamper(name: str, params: Mapping[str, Any]) -> Any:
        rig.tamper = None
        return spoil(params)

    rig.tamper = tamper


CAUSES = [*FAILURES, "answer_refused", "blocked"]


def break_it(rig: Rig, failure: str, release: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch) -> None:
    if failure == "blocked":
        block(rig, release, monkeypatch)
    elif failure == "answer_refused":
        refuse_answers(rig)
    else:
        FAILURES[failure][0](rig)


class Client:
    """One request as a deployment serves it: prefill, decode, and prefill again as often as the engine asks for it."""

    def __init__(self, rig: Rig, name: str, *, retries: int) -> None:
        assert rig.prefill is not None
        self.rig, self.name, self.prompt, self.retries = rig, name, prompt_of(PROMPT, 1), retries
        self.attempts, self.at_decode, self.wanted = 0, False, True
        rig.served[name] = Served(self.prompt, TOKENS)

    def turn(self) -> bool:
        """One step of each engine. True = the request has ended."""
        rig = self.rig
        assert rig.prefill is not None
        if self.wanted:
            self.wanted, self.attempts = False, self.attempts + 1
            self.attempt_id = self.name if self.attempts == 1 else f"{self.name}-{self.attempts}"
            rig.prefill.add(self.attempt_id, self.prompt, greedy(1), do_remote_decode=True)
        for output in rig.prefill.step():
            if output.finish_reason is not None and output.request_id == self.attempt_id:
                self.hand_over(rig.tamper(self.name, output.kv_transfer_params) if rig.tamper else output.kv_transfer_params)
        for output in rig.decode.step():
            assert output.retry_prefill is None or (output.finish_reason is None and not output.new_token_ids)
            self.wanted |= output.retry_prefill is not None
        if rig.watch is not None:
            rig.watch()
        return rig.ended(self.name)

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, [engine.core.stats() for engine in self.rig.engines]
            time.sleep(0.0003)

    def hand_over(self, params: Any) -> None:
        left, core = self.retries + 1 - self.attempts, self.rig.decode.core
        if self.at_decode:
            core.resume(self.name, kv_transfer_params=params, retries_left=left)
            return
        self.at_decode = True
        try:
            self.rig.decode.add(self.name, self.prompt, greedy(TOKENS), kv_transfer_params=params, prefill_retries=left)
        except RequestError as error:
            self.rig.refused[self.name] = error


def ask(rig: Rig, name: str, *, retries: int = 0) -> int:
    """To the end of the request. Returns the number of attempts."""
    client = Client(rig, name, retries=retries)
    client.until(client.turn)
    return client.attempts


def heal(rig: Rig, release: list[Callable[[], None]]) -> None:
    rig.faults.fail = rig.faults.hang = rig.faults.silent = lambda number: False
    for go_on in release:
        go_on()


# ------------------------------------------------------------------------------------------- the budget
@pytest.mark.parametrize("failure", CAUSES)
def test_b34_the_budget_holds_for_every_failure(pair: MakeRig, failure: str, release: list[Callable[[], None]],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    rig = pair(failure, local_prefill_tokens=200)
    core = rig.decode.core
    assert core.load_failures.decide("another", tokens=100, retries_left=0) is Recovery.RECOMPUTE
    break_it(rig, failure, release, monkeypatch)
    assert ask(rig, "victim") == 1
    if "victim" in rig.refused:
        error = str(rig.refused["victim"])
        assert rig.refused["victim"].status == 503  # type: ignore[attr-defined]
    else:
        answer = rig.answer("victim")
        error = str(answer.error)
        assert answer.finish_reason is FinishReason.ERROR and not answer.token_ids
    assert "100 prompt tokens are being recomputed here, of pd.local_prefill_tokens = 200" in error and "retry later" in error
    assert core.stats().local_prefill_tokens == 0 and core.load_failures.refused == 1
    assert core.load_failures.tokens == 100, "who was refused counts nothing"
    heal(rig, release)
    rig.drain()


@pytest.mark.parametrize("failure", CAUSES)
def test_a_recompute_takes_from_the_budget_until_its_first_token(pair: MakeRig, failure: str,
                                                                 release: list[Callable[[], None]],
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    rig = pair(failure, local_prefill_tokens=200)
    core, seen = rig.decode.core, set()
    step = rig.decode.step

    def watch() -> list[Any]:
        outputs = step()
        tokens = len(rig.answer("victim").token_ids) if "victim" in rig.decode.answers else 0
        seen.add((core.load_failures.tokens, tokens > 0))
        return outputs

    monkeypatch.setattr(rig.decode, "step", watch)
    break_it(rig, failure, release, monkeypatch)
    assert ask(rig, "victim") == 1
    rig.check("victim")
    assert seen >= {(PROMPT, False), (0, True)} and (PROMPT, True) not in seen, seen
    stats = core.stats()
    assert stats.local_prefill_tokens == PROMPT and stats.import_failures == 1
    assert rig.answer("victim").stats.import_failures == 1  # type: ignore[union-attr]
    heal(rig, release)
    rig.drain()


def test_no_prefill_at_all_meets_the_same_budget(pair: MakeRig) -> None:
    rig = pair(local_prefill_tokens=200)
    core = rig.decode.core
    rig.decode.add("a", prompt_of(PROMPT, 1), greedy(TOKENS), prefill_failed="prefill is down")
    with pytest.raises(RequestError, match="prefill is down.*150 prompt tokens are being recomputed.*retry later") as refused:
        rig.decode.add("b", prompt_of(PROMPT, 2), greedy(TOKENS), prefill_failed="prefill is down")
    assert refused.value.status == 503 and set(core.requests) == {"a"}
    rig.decode.add("c", prompt_of(40, 3), greedy(TOKENS), prefill_failed="prefill is down")
    assert core.load_failures.tokens == PROMPT + 40
    core.abort("c")
    assert core.load_failures.tokens == PROMPT, "an abort gives back what it took"
    rig.decode.run_until(lambda: rig.answer("a").finish_reason is not None)
    check_tokens("a", rig.path, prompt_of(PROMPT, 1), rig.answer("a").token_ids, complete=TOKENS)
    assert core.load_failures.tokens == 0 and core.stats().local_prefill_tokens >= PROMPT
    rig.decode.add("d", prompt_of(PROMPT, 1), greedy(TOKENS), prefill_failed="prefill is down")
    assert 0 < core.load_failures.tokens < 32, "a prefix hit need not be computed"
    rig.decode.run_until(lambda: rig.answer("d").finish_reason is not None)
    check_tokens("d", rig.path, prompt_of(PROMPT, 1), rig.answer("d").token_ids, complete=TOKENS)
    rig.drain()


# ------------------------------------------------------------------------------------------- retries
@pytest.mark.parametrize("failure", [cause for cause in CAUSES if cause not in ("silent", "peer_gone", "blocked")])
def test_a_retry_finds_the_next_answer(pair: MakeRig, failure: str, release: list[Callable[[], None]],
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    rig = pair(failure, kv_load_failure_policy="fail")
    break_it(rig, failure, release, monkeypatch)
    assert ask(rig, "victim", retries=3) == 2
    rig.check("victim")
    stats = rig.answer("victim").stats
    assert stats is not None and stats.import_failures == 1 and stats.imported_tokens == PROMPT and stats.landing is not None
    assert rig.decode.core.stats().local_prefill_tokens == 0 and rig.decode.core.stats().finished == 1
    rig.drain()


def test_a_drain_ends_what_waits_for_a_retry(pair: MakeRig, release: list[Callable[[], None]]) -> None:
    rig = pair("transfer")
    core = rig.decode.core
    FAILURES["transfer"][0](rig)
    client = Client(rig, "victim", retries=2)
    client.until(lambda: client.turn() or (client.attempts == 1 and client.wanted))
    assert set(core.requests) == {"victim"} and not core.scheduler.num_live
    assert core.drain() == 1 and not core.requests
    (last,) = core.take_outputs()
    assert last.finish_reason is FinishReason.ERROR and last.retry and "is being stopped; retry" in str(last.error)
    core.resume("victim", prefill_failed="too late")
    assert not core.requests and not core.take_outputs()
    heal(rig, release)
    rig.drain()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("failure", ["silent", "peer_gone", "blocked"])
def test_retries_are_bounded_and_the_policy_follows(pair: MakeRig, failure: str, policy: str,
                                                    release: list[Callable[[], None]],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """These go on failing."""
    rig = pair(failure, kv_load_failure_policy=policy)
    core = rig.decode.core
    break_it(rig, failure, release, monkeypatch)
    assert ask(rig, "victim", retries=2) == 3
    stats = core.stats()
    assert stats.import_failures == 3 and core.load_failures.tokens == 0
    if policy == "fail":
        answer = rig.answer("victim")
        assert answer.finish_reason is FinishReason.ERROR and not answer.token_ids and "is fail" in str(answer.error)
    else:
        rig.check("victim")
        assert stats.local_prefill_tokens == PROMPT
    if failure == "blocked":
        assert stats.cache["loads_in_flight"] == 3, "each attempt's pages are in quarantine, under a name of its own"
    heal(rig, release)
    rig.drain()


@pytest.mark.parametrize("failure", ["transfer", "blocked"])
def test_a_client_that_leaves_between_attempts(pair: MakeRig, failure: str, release: list[Callable[[], None]],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    rig = pair(failure)
    core = rig.decode.core
    assert rig.prefill is not None and rig.prefill.pd is not None
    break_it(rig, failure, release, monkeypatch)
    client = Client(rig, "victim", retries=1)
    client.until(lambda: client.turn() or client.wanted)
    core.abort("victim")
    assert not core.requests and core.load_failures.tokens == 0
    heal(rig, release)
    client.until(lambda: client.turn() and client.attempts == 2 and not rig.prefill.core.requests)  # type: ignore[union-attr]
    assert rig.answer("victim").finish_reason is FinishReason.ABORT and client.attempts == 2
    assert rig.prefill.pd.stats().leases_expired == 0, "prefill is told that nobody reads the second answer"
    rig.drain()


# ------------------------------------------------------------------------------------------- seeded faults
FOUND_BY: list[tuple[Fault, Callable[..., None], tuple[str, ...]]] = [
    (load_faults.a_failed_import_needs_no_budget, test_b34_the_budget_holds_for_every_failure, ("transfer",)),
    (load_faults.the_budget_is_kept_to_the_end, test_a_recompute_takes_from_the_budget_until_its_first_token, ("transfer",)),
    (load_faults.an_overdue_import_keeps_its_name, test_a_recompute_takes_from_the_budget_until_its_first_token, ("blocked",)),
    (load_faults.an_overdue_import_is_an_error, test_a_recompute_takes_from_the_budget_until_its_first_token, ("blocked",)),
    (load_faults.a_retry_counts_for_nothing, test_retries_are_bounded_and_the_policy_follows, ("silent", "recompute")),
    (load_faults.an_unusable_answer_is_not_a_failure, test_b34_the_budget_holds_for_every_failure, ("answer_refused",)),
    (load_faults.nobody_tells_prefill_that_the_client_left, test_a_client_that_leaves_between_attempts, ("transfer",)),
]


@pytest.mark.parametrize(("fault", "test", "arguments"), FOUND_BY, ids=lambda value: getattr(value, "__name__", ""))
def test_fault_is_found(fault: Fault, test: Callable[..., None], arguments: tuple[str, ...], pair: MakeRig,
                        release: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert {entry[0] for entry in FOUND_BY} == set(load_faults.LOAD_FAULTS)
    fault(monkeypatch)
    monkeypatch.setitem(globals(), "PATIENCE_S", 3.0)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(pair, *arguments, release, monkeypatch)
