"""What the engine needs of the parts that others give it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hisparse.connector.base import RemoteDecode, RemotePrefill, SchedulerConnector


class PDConnector(SchedulerConnector, RemotePrefill, RemoteDecode, Protocol):
    """What the engine needs of a P/D connector's scheduler half; hisparse.pd implements it."""

    def add_remote(self, request_id: str, kv_transfer_params: Mapping[str, Any], *, num_prompt_tokens: int,
                   digest_of: Callable[[int], str]) -> int: ...
    def reject_remote(self, kv_transfer_params: Any, reason: str) -> None: ...
    def release_request(self, request_id: str) -> None: ...
    def problem(self) -> str: ...
    def stats(self) -> Any: ...
    def landing_log(self) -> Sequence[Mapping[str, Any]]: ...


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer; None disables text."""

    eos_token_ids: tuple[int, ...]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
