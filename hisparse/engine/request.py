"""One request as the engine sees it: tokens so far, where it stands, what happened to it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from hisparse.cache.prefix import ExtraKeys, prompt_digest
from hisparse.layout import KVCacheLayout
from hisparse.types import Landing, RequestStats, RequestTimeline, ResolveStats, SampledToken, SamplingParams


class RequestState(enum.Enum):
    """Where a request stands in the scheduler."""

    WAITING = "waiting"
    """No blocks: new, preempted, or sent back after a failed load."""
    RETRYING = "retrying"
    """No blocks: its import failed, and prefill is being asked again."""
    LOADING = "loading"
    """Holds its blocks; an import or an indexer load is under way on the workers."""
    RUNNING = "running"
    HELD = "held"
    """Prefill role: finished, its pages are leased to a decode engine."""
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Mutable; written by the engine core, its scheduler and its outputs alone."""

    request_id: str
    """Names it towards cache, connectors and ranks. It changes when an import cannot be ended: see `Imports.overdue`."""
    name: str
    """What its client calls it."""
    token_ids: list[int]
    """Prompt, then every accepted output token."""
    num_prompt_tokens: int
    sampling: SamplingParams
    arrival: int
    """Order of arrival, a counter: earlier is served first within a priority."""
    arrived_s: float = 0.0
    """On the engine's clock."""
    arrived_unix_s: float = 0.0
    """On the wall clock."""
    queue_s: float | None = None
    """From the arrival to the first admission."""
    loaded_s: float | None = None
    """From the arrival to the end of the first import."""
    first_token_s: float | None = None
    """From the arrival to the first token."""
    priority: int = 0
    cache_salt: str | None = None
    do_remote_decode: bool = False
    remote: bool = False
    """Prefill was asked for its prompt's KV."""
    retries_left: int = 0
    """Times that prefill can still be asked."""
    recomputes: bool = False
    """Its prompt is computed here because prefill or an import failed."""
    state: RequestState = RequestState.WAITING
    computed: int = 0
    """Tokens whose KV is in the cache."""
    seat: int = -1
    landing: Landing | None = None
    importing: bool = False
    """Its latest load is (also) an import from prefill, not only one from the own indexer store."""
    cached_tokens: int | None = None
    imported_tokens: int = 0
    preemptions: int = 0
    import_failures: int = 0
    spilled_pages: int = 0
    resolve: ResolveStats = field(default_factory=ResolveStats)
    new_tokens: list[SampledToken] = field(default_factory=list)
    """Accepted since the last output."""
    unscored: list[SampledToken] = field(default_factory=list)
    """With log probabilities asked for: accepted, their text not yet given out."""
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: higher priority first, then arrival."""
        return (-self.priority, self.arrival)

    @property
    def pending_tokens(self) -> int:
        """Tokens to run before the next one can be sampled; a full hit replays the last token (1)."""
        return max(len(self.token_ids) - self.computed, 1)

    @property
    def replays(self) -> bool:
        """Every token's KV is there: the last token runs again for its logits and writes nothing."""
        return self.computed >= len(self.token_ids)

    def prompt_digest(self, layout: KVCacheLayout, num_tokens: int) -> str:
        """Of the prompt's first tokens, with the salt: prefill and decode must mean the same ones."""
        return prompt_digest(layout.row_fingerprint(), ExtraKeys(cache_salt=self.cache_salt), self.token_ids[:num_tokens])

    def timeline(self) -> RequestTimeline:
        return RequestTimeline(arrived_unix_s=self.arrived_unix_s, admitted_s=self.queue_s, loaded_s=self.loaded_s,
                               first_token_s=self.first_token_s)

    def stats(self) -> RequestStats:
        return RequestStats(
            prompt_tokens=self.num_prompt_tokens, cached_tokens=self.cached_tokens or 0, landing=self.landing,
            preemptions=self.preemptions, import_failures=self.import_failures, imported_tokens=self.imported_tokens,
            spilled_pages=self.spilled_pages, queue_s=self.queue_s, resolve=self.resolve,
        )
