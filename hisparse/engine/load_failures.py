"""What becomes of a request whose prompt's KV did not come from prefill, whatever the reason: one owner of the whole policy."""

from __future__ import annotations

import enum

from hisparse.config import PDConfig


class Recovery(enum.Enum):
    """What is next for a request whose import failed."""

    RETRY = "retry"
    """Prefill is asked again, by whoever asked it before."""
    RECOMPUTE = "recompute"
    """This engine computes the prompt; its tokens count against the budget until the first token or the end."""
    REFUSE = "refuse"
    """It ends with an error (503)."""


class LoadFailurePolicy:
    """`pd.kv_load_failure_policy`, and `pd.local_prefill_tokens` shared by all requests of an engine. Single-threaded.

    A dead prefill pool must not drown decode: without a bound, every failed import would silently become a long prefill here.

    Attributes:
        refused: requests so far that were to be recomputed and found no room in the budget.
    """

    def __init__(self, config: PDConfig) -> None:
        self._recomputes = config.kv_load_failure_policy == "recompute"
        self._limit_tokens = config.local_prefill_tokens
        self._tokens: dict[str, int] = {}
        self.refused = 0

    @property
    def tokens(self) -> int:
        """Prompt tokens that are being computed here because prefill or an import failed."""
        return sum(self._tokens.values())

    def decide(self, request_id: str, *, tokens: int, retries_left: int) -> Recovery:
        """Decides after a failure, before the first token. A recompute takes its tokens from the budget.

        Args:
            tokens: to compute here, without what a prefix hit brings. One request alone may exceed the budget, unless it is 0.
            retries_left: times that prefill may still be asked for this request.
        """
        if retries_left > 0:
            return Recovery.RETRY
        if not self._recomputes:
            return Recovery.REFUSE
        others = self.tokens - self._tokens.get(request_id, 0)
        if self._limit_tokens == 0 or (others and others + tokens > self._limit_tokens):
            self.refused += 1
            return Recovery.REFUSE
        self._tokens[request_id] = tokens
        return Recovery.RECOMPUTE

    def end(self, request_id: str) -> None:
        """The request has its first token, or is gone. Idempotent."""
        self._tokens.pop(request_id, None)

    def refusal(self) -> str:
        """Why `decide` said REFUSE, and what can be done."""
        if not self._recomputes:
            return "pd.kv_load_failure_policy is fail; retry"
        return (f"{self.tokens} prompt tokens are being recomputed here, of pd.local_prefill_tokens = {self._limit_tokens}; "
                "retry later")
