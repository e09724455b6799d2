"""Which decode replica a request goes to: the one that has seen most of its prompt, unless others have much less to do.

Each ingress replica remembers where it sent what; a wrong memory costs a prefix hit, never an answer.
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from hisparse.serve.calls import GenerateCall

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


class PrefixRouter(RequestRouter):
    """Serve makes one for each handle of the decode deployment. With equal or unknown prefixes: the shorter queue of two."""

    def initialize_state(self, *, slack: int = 8, **kwargs: Any) -> None:
        """Args: slack: open requests that the replica with the prefix may have more than the least busy one."""
        self._slack = slack
        self._table, self._attempts = PrefixTable(), PrefixTable(MAX_ATTEMPTS_KNOWN)

    async def choose_replicas(self, candidate_replicas: list[RunningReplica],
                              pending_request: PendingRequest | None = None) -> list[list[RunningReplica]]:
        """Ranks: the replica with the prefix, then two others; Serve takes the first that accepts. A repeated request goes
        anywhere but where its last attempt failed.
        """
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        call = _call_of(pending_request)
        failed = self._attempts.find(_attempt(call), replicas) if call is not None and call.retry_of is not None else None
        if failed is not None and len(replicas) > 1:
            others = [replica for name, replica in replicas.items() if name != failed]
            return [random.sample(others, min(2, len(others))), [replicas[failed]]]
        known = None
        if pending_request is not None and call is not None and len(replicas) > 1:
            known = self._table.find(_chain(pending_request, call), replicas)
        others = [replica for name, replica in replicas.items() if name != known]
        ranks = [random.sample(others, min(2, len(others)))]
        if known is not None and not self._is_busy(known, replicas):
            ranks.insert(0, [replicas[known]])
        return ranks

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        call = _call_of(pending_request)
        if call is not None:
            self._table.remember(_chain(pending_request, call), replica_id)
            self._attempts.remember(_attempt(call), replica_id)

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


def _attempt(call: GenerateCall) -> list[bytes]:
    """The key of all attempts at one request."""
    return [(call.retry_of or call.request_id).encode()]


def _call_of(request: PendingRequest | None) -> GenerateCall | None:
    call = request.args[0] if request is not None and request.args else None
    return call if isinstance(call, GenerateCall) else None
