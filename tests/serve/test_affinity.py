"""Beginnings of prompts and who has seen them; no Serve. The router itself runs in tests/integration/test_routing.py."""

from __future__ import annotations

import asyncio
import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.request_router import PendingRequest

from hisparse.config import PDConfig
from hisparse.serve import affinity
from hisparse.serve.affinity import (
    CHUNK_CHARS,
    CHUNK_TOKENS,
    MAX_CHUNKS,
    PrefixRouter,
    PrefixTable,
    RetryRouter,
    prefix_chain,
)
from hisparse.serve.calls import GenerateCall, PrefillAnswer, PrefillCall
from hisparse.serve.prefill import PrefillClient


def chain(**fields: Any) -> list[bytes]:
    return prefix_chain(GenerateCall(request_id="r", **fields))


def test_a_conversation_keeps_its_chain() -> None:
    turns = [("system", "s" * 300), ("user", "a" * 300), ("assistant", "b" * 300), ("user", "c" * 300)]
    first, second = chain(messages=tuple(turns[:2])), chain(messages=tuple(turns))
    assert len(first) == 2 and len(second) == 4 and second[:2] == first
    other = chain(messages=(turns[0], ("user", "x" * 300)))
    assert other[0] == first[0] and other[1] != first[1]


@pytest.mark.parametrize("change", [
    {"text": "y" + "x" * 1000}, {"cache_salt": "another"}, {"cache_salt": "None"}, {"text": None, "token_ids": (1,) * 1000}])
def test_other_prompts_and_salts_have_other_chains(change: dict[str, Any]) -> None:
    """A tenant's requests must not gather where another tenant's are: they could not hit, and would learn something."""
    assert not set(chain(text="x" * 1000)) & set(chain(**{"text": "x" * 1000} | change))


def test_only_whole_chunks_count_and_not_without_end() -> None:
    assert chain(text="x" * (CHUNK_CHARS - 1)) == [] == chain(token_ids=(1,) * (CHUNK_TOKENS - 1))
    assert len(chain(text="x" * (2 * CHUNK_CHARS + 5))) == 2 == len(chain(token_ids=(1,) * (2 * CHUNK_TOKENS + 3)))
    assert len(chain(text="x" * CHUNK_CHARS * 10 * MAX_CHUNKS)) == MAX_CHUNKS
    assert len(chain(text="\ud800" * CHUNK_CHARS)) == 1, "half a surrogate pair is no error here"


def test_the_longest_beginning_counts_among_those_that_live() -> None:
    table = PrefixTable()
    long, short = chain(text="x" * 1024), chain(text="x" * 512 + "y" * 512)
    assert table.find(long, {"a", "b"}) is None and table.find([], {"a"}) is None
    table.remember(long, "a")
    table.remember(short, "b")
    assert table.find(long, {"a", "b"}) == "a", "b has seen only half of it, although later"
    assert table.find(long, {"b"}) == "b", "a is gone"
    assert table.find(chain(text="x" * 512), {"a", "b"}) == "b", "the last one that has seen it"
    assert table.find(chain(text="z" * 512), {"a", "b"}) is None


def test_the_table_is_bounded() -> None:
    table = PrefixTable(max_entries=6)
    for i in range(5):
        table.remember(chain(text=f"{i}" * 512), i)
        table.remember(chain(text="0" * 512), 0)
        assert len(table) <= 6
    assert table.find(chain(text="0" * 512), range(5)) == 0 and table.find(chain(text="4" * 512), range(5)) == 4
    assert table.find(chain(text="1" * 512), range(5)) is None


def test_a_prompt_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often Serve chooses for it before a replica accepts; and each prompt goes by its own hash."""
    hashed: list[str | None] = []
    monkeypatch.setattr(affinity, "prefix_chain", lambda call: hashed.append(call.text) or prefix_chain(call))
    replicas: list[Any] = [SimpleNamespace(replica_id=name) for name in "abc"]

    async def route() -> list[Any]:
        router = PrefixRouter.__new__(PrefixRouter)  # its own state only: Serve's needs a cluster
        router._replica_queue_len_cache = {}  # type: ignore[assignment]
        router.initialize_state()
        first = []
        for text, home in (("x" * 1000, "a"), ("y" * 1000, "b"), ("x" * 2000, None), ("y" * 2000, None)):
            request = PendingRequest([GenerateCall(request_id="r", text=text)], {}, SimpleNamespace())  # type: ignore[arg-type]
            for _ in range(3):
                ranks = await router.choose_replicas(replicas, request)
            if home is not None:
                router.on_request_routed(request, home, None)
            else:
                first.append([replica.replica_id for replica in ranks[0]])
        return first

    assert asyncio.run(route()) == [["a"], ["b"]]
    assert hashed == ["x" * 1000, "y" * 1000, "x" * 2000, "y" * 2000]


class Fleet:
    """Prefill replicas behind a router, without Serve: a call goes to the first of the first rank that accepts."""

    def __init__(self, names: str) -> None:
        self.names, self.busy, self.asked = names, "", list[str]()
        self.router = RetryRouter.__new__(RetryRouter)  # its own state only: Serve's needs a cluster
        self.router.initialize_state()

    async def send(self, call: PrefillCall) -> PrefillAnswer:
        request = PendingRequest([call], {}, SimpleNamespace())  # type: ignore[arg-type]
        ranks = await self.router.choose_replicas([SimpleNamespace(replica_id=name) for name in self.names],  # type: ignore
                                                  request)
        name = next(replica.replica_id for rank in ranks for replica in rank if str(replica.replica_id) not in self.busy)
        self.router.on_request_routed(request, name, None)
        self.asked.append(str(name))
        return PrefillAnswer(request_id=call.request_id, kv_transfer_params={"by": name})

    def ask(self, request_id: str, attempts: int) -> str:
        """Where decode's client asks when `attempts` were made before, whose imports failed."""
        client = PrefillClient(self.send, PDConfig(max_retries=3), backoff_s=0.0)
        answer, _ = asyncio.run(client.prefill(request_id, (1, 2), cache_salt=None, deadline=time.monotonic() + 60,
                                               attempts=attempts))
        assert answer.error is None
        return self.asked[-1]


def test_a_retry_of_a_failed_import_asks_another_prefill_replica() -> None:
    fleet = Fleet("abc")
    for number in range(30):
        places = [fleet.ask(f"d-{number}", attempts) for attempts in range(4)]
        assert all(later != earlier for earlier, later in itertools.pairwise(places)), places
    assert {fleet.ask(f"new-{number}", 0) for number in range(60)} == set("abc"), "other requests go anywhere"


@pytest.mark.parametrize("why", ["only one", "others are busy", "gone"])
def test_a_retry_goes_where_its_last_attempt_was_if_nobody_else_can_take_it(why: str) -> None:
    fleet = Fleet("ab")
    last = fleet.ask("d-1", 0)
    if why == "only one":
        fleet.names = last
    elif why == "others are busy":
        fleet.busy = "ab".replace(last, "")
    else:
        fleet.names = "cd"
    again = fleet.ask("d-1", 1)
    assert again in "cd" if why == "gone" else again == last


def test_what_is_known_of_attempts_is_bounded() -> None:
    fleet = Fleet("ab")
    for number in range(affinity.MAX_ATTEMPTS_KNOWN + 10):
        fleet.router._attempts.remember([f"d-{number}-p1".encode()], "a")
    assert len(fleet.router._attempts) == affinity.MAX_ATTEMPTS_KNOWN
