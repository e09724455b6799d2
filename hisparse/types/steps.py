"""One step of the engine: which tokens every rank computes, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hisparse.types.commands import TableUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. temperature 0 = greedy."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledChunk:
    """One request's share of a step: `token_ids` are the tokens at positions first_position, first_position + 1, ...

    Attributes:
        writes: False for a replayed last token: its KV is there already; the worker writes no row in any group.
        sample: take a token from the last position's logits.
        plain_tables: every page of the context is resident, so the block tables alone resolve it.
    """

    request_id: str
    seat: int
    first_position: int
    token_ids: tuple[int, ...]
    writes: bool = True
    sample: bool = False
    plain_tables: bool = False
    sampling: SamplingParams | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommand:
    """One engine step for every rank. `kv` maps a connector's name to its metadata."""

    step: int
    chunks: tuple[ScheduledChunk, ...] = ()
    table_updates: tuple[TableUpdate, ...] = ()
    """Used only when HiSparse is off; otherwise updates travel in SparseKVOffloadCommand."""
    kv: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One rank's output of one step. Only rank 0 fills `sampled`. `kv` maps a connector's name to its output."""

    step: int
    rank: int
    incarnation: int
    sampled: Mapping[str, SampledToken] = field(default_factory=dict)
    kv: Mapping[str, Any] = field(default_factory=dict)
    worked_s: float = 0.0
    """From the rank's taking of the command to this answer; on CUDA it includes the wait for the device."""
