"""What becomes of a request of a schedule whose attempt failed, by the engine's own policy; and the laws of that policy."""

from __future__ import annotations

from hisparse.engine.load_failures import Recovery
from tests.pd.requests import Request, State
from tests.pd.world_part import WorldPart


class Fallbacks(WorldPart):
    """Part of `World`."""

    def fall_back(self, request: Request, why: str) -> None:
        """What the policy says: prefill is asked again, or a local prefill within the budget, or an error."""
        assert why, f"{request.request_id} failed without a reason"
        if request.pages is not None:
            self.decode.free(request.pages)
            request.pages = None
        config, tokens = self.decode.config, request.content.num_tokens
        others = self.tokens_here()
        left = 1 + config.max_retries - request.attempts
        decision = self.failures.decide(request.client, tokens=tokens, retries_left=left)
        if decision is Recovery.RETRY:
            self.ask(request)
            return
        self.met[decision.value] += 1
        assert left <= 0, f"{request.client} is not retried though {left} retries are left"
        request.error = why
        if decision is Recovery.RECOMPUTE:
            request.state = State.RECOMPUTING
            return
        room = config.local_prefill_tokens and (not others or others + tokens <= config.local_prefill_tokens)
        assert config.kv_load_failure_policy == "fail" or not room, f"{request.client} is refused: {others} tokens, {config}"
        self.decode.pd.request_closed(request.request_id)
        request.state = State.ERROR

    def tokens_here(self) -> int:
        """Prompt tokens that decode computes because an attempt failed, counted by hand."""
        return sum(request.content.num_tokens for request in self.of(State.RECOMPUTING))

    def compute(self) -> bool:
        """A prompt that prefill did not bring is computed: its request needs no attempt any more."""
        computing = self.of(State.RECOMPUTING)
        if computing:
            request = self.rng.choice(computing)
            request.state = State.RECOMPUTED
            self.failures.end(request.client)
            self.decode.pd.request_closed(request.request_id)
        return bool(computing)

    def start_over(self, request: Request, why: str) -> None:
        """Its import is overdue: the pages may still be written and stay with the old name, until drained."""
        assert request.pages is not None
        self.zombies[request.request_id], request.pages = request.pages, None
        self.decode.pd.request_closed(request.request_id)
        del self.requests[request.request_id]
        request.request_id = f"{request.client}~{len(self.requests)}-{self.asks}"
        self.requests[request.request_id] = request
        self.fall_back(request, why)

    def check_policy(self) -> None:
        """No more prompts are computed here than the policy allows, and each counts once."""
        config, here = self.decode.config, self.of(State.RECOMPUTING)
        assert not here or config.kv_load_failure_policy == "recompute", "the policy says that nothing is recomputed"
        assert len(here) <= bool(config.local_prefill_tokens) or self.tokens_here() <= config.local_prefill_tokens, \
            f"{self.tokens_here()} tokens are recomputed at once of {config.local_prefill_tokens}"
        assert self.failures.tokens == self.tokens_here()
