"""Which decode replica a request goes to: the one that has seen most of its prompt, unless others have much less to do. And
where a request goes that is repeated, to decode or to prefill: not where its last attempt was.

Whoever sends remembers where it sent what; a wrong memory costs a prefix hit or an attempt, never an answer.
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from hisparse.serve.calls import GenerateCall, PrefillCall

CHUNK_CHARS = 256
"""About a page of 64 tokens."""
CHUNK_TOKENS = 64
MAX_CHUNKS = 128
"""Of a prompt that are looked at: conversations differ sooner."""
MAX_ENTRIES = 1 << 16
MAX_ATTEMPTS_KNOWN = 1 << 12


def prefix_chain(call: GenerateCall) -> list[bytes]:
    """One digest for each whole chunk of the prompt's beginning, each over everything before it; equal chains mean equal
    beginnings, and the same `cache_salt`. A conversation that goes on keeps its chain and adds to it.
    """
    pieces: Iterable[bytes]
    if call.token_ids is not None:
        whole = len(call.token_ids) // CHUNK_TOKENS
        pieces = (repr(call.token_ids[i * CHUNK_TOKENS : (i + 1) * CHUNK_TOKENS]).encode()
                  for i in range(min(whole, MAX_CHUNKS)))
    else:
        text = call.text or "".join(f"{role}\0{content}\0" for role, content in call.messages or ())
        whole = len(text) // CHUNK_CHARS
        pieces = (text[i * CHUNK_CHARS : (i + 1) * CHUNK_CHARS].encode("utf-8", "surrogatepass")
                  for i in range(min(whole, MAX_CHUNKS)))
    digest = hashlib.blake2b(repr(call.cache_salt).encode(), digest_size=12).digest()
    chain = []
    for piece in pieces:
        digest = hashlib.blake2b(digest + piece, digest_size=12).digest()
        chain.append(digest)
    return chain


class PrefixTable:
    """Who has last seen which beginning. Bounded; the longest unused goes first. Not thread-safe."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max = max_entries
        self._seen: OrderedDict[bytes, Hashable] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def find(self, chain: Sequence[bytes], among: Collection[Any]) -> Any:
        """Who of `among` has seen the longest beginning; None = nobody."""
        for digest in reversed(chain):
            who = self._seen.get(digest)
            if who is not None and who in among:
                return who
        return None

    def remember(self, chain: Sequence[bytes], who: Hashable) -> None:
        for digest in chain:
            self._seen[digest] = who
            self._seen.move_to_end(digest)
        while len(self._seen) > self._max:
            self._seen.popitem(last=False)


class RetryRouter(RequestRouter):
    """Serve makes one for each handle of the prefill deployment. The shorter queue of two, as Serve's own; a repeated request
    goes anywhere but where its last attempt was, and there only if there is nobody else or nobody else accepts.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        self._attempts = PrefixTable(MAX_ATTEMPTS_KNOWN)

    async def choose_replicas(self, candidate_replicas: list[RunningReplica],
                              pending_request: PendingRequest | None = None) -> list[list[RunningReplica]]:
        """Ranks; Serve takes the first that accepts."""
        return self._elsewhere(_call_of(pending_request), candidate_replicas) or [_two_of(candidate_replicas)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        call = _call_of(pending_request)
        if call is not None:
            self._attempts.remember(_attempt(call), replica_id)

    def _elsewhere(self, call: GenerateCall | PrefillCall | None,
                   replicas: Sequence[RunningReplica]) -> list[list[RunningReplica]] | None:
        """Ranks for a repeated request; None = it is not one, its last attempt's replica is gone, or it is the only one."""
        if call is None or call.retry_of is None or len(replicas) < 2:
            return None
        last = self._attempts.find(_attempt(call), [replica.replica_id for replica in replicas])
        if last is None:
            return None
        return [_two_of([replica for replica in replicas if replica.replica_id != last]),
                [replica for replica in replicas if replica.replica_id == last]]


class PrefixRouter(RetryRouter):
    """Serve makes one for each handle of the decode deployment. With equal or unknown prefixes: the shorter queue of two."""

    def initialize_state(self, *, slack: int = 8, **kwargs: Any) -> None:
        """Args: slack: open requests that the replica with the prefix may have more than the least busy one."""
        super().initialize_state(**kwargs)
        self._slack, self._table = slack, PrefixTable()

    async def choose_replicas(self, candidate_replicas: list[RunningReplica],
                              pending_request: PendingRequest | None = None) -> list[list[RunningReplica]]:
        """Ranks: the replica with the prefix, then two others; Serve takes the first that accepts."""
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        call = _call_of(pending_request)
        elsewhere = self._elsewhere(call, candidate_replicas)
        if elsewhere is not None:
            return elsewhere
        known = None
        if pending_request is not None and isinstance(call, GenerateCall) and len(replicas) > 1:
            known = self._table.find(_chain(pending_request, call), replicas)
        ranks = [_two_of([replica for name, replica in replicas.items() if name != known])]
        if known is not None and not self._is_busy(known, replicas):
            ranks.insert(0, [replicas[known]])
        return ranks

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        call = _call_of(pending_request)
        if isinstance(call, GenerateCall):
            self._table.remember(_chain(pending_request, call), replica_id)

    def _is_busy(self, who: Any, replicas: Collection[Any]) -> bool:
        """An unknown length of a queue counts as 0."""
        lengths = {name: self.replica_queue_len_cache.get(name) or 0 for name in replicas}
        return lengths[who] > min(lengths.values()) + self._slack


def _chain(request: PendingRequest, call: GenerateCall) -> list[bytes]:
    """`prefix_chain`, hashed once and kept on Serve's request: it chooses again while no replica accepts, then routes."""
    chain: list[bytes] | None = vars(request).get("hisparse_chain")
    if chain is None:
        chain = vars(request)["hisparse_chain"] = prefix_chain(call)
    return chain


def _two_of(replicas: Sequence[RunningReplica]) -> list[RunningReplica]:
    return random.sample(replicas, min(2, len(replicas)))


def _attempt(call: GenerateCall | PrefillCall) -> list[bytes]:
    """The key of all attempts at one request."""
    return [(call.retry_of or call.request_id).encode()]


def _call_of(request: PendingRequest | None) -> GenerateCall | PrefillCall | None:
    call = request.args[0] if request is not None and request.args else None
    return call if isinstance(call, GenerateCall | PrefillCall) else None
