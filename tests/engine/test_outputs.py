"""Increments of answers: text and log probabilities leave together, whatever id the request has towards the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hisparse.engine.outputs import Outputs
from hisparse.engine.request import Request
from hisparse.types import FinishReason, SampledToken, SamplingParams


class Bytes:
    """Token id = byte; 0 ends a sequence."""

    eos_token_ids = (0,)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode("utf8", errors="replace")


def run(text: bytes, *, request_id: str = "a", **sampling: object) -> list[tuple[str, str, FinishReason | None]]:
    """(text, text of the tokens with log probabilities, reason) of each increment until the end."""
    outputs = Outputs(Bytes())
    request = Request(request_id=request_id, name="a", token_ids=[65], num_prompt_tokens=1, arrival=0,
                      sampling=SamplingParams(max_tokens=len(text), logprobs=1, **sampling))  # type: ignore[arg-type]
    outputs.open(request)
    for byte in text:
        token = SampledToken(token_id=byte, logprob=-1.0)
        request.token_ids.append(byte)
        request.new_tokens.append(token)
        piece, reason = outputs.accept(request, token)
        outputs.emit(request, piece, finish=reason)
        if reason is not None:
            break
    outputs.close(request)
    found = outputs.take()
    assert not outputs and [output.request_id for output in found] == ["a"] * len(found)
    return [(o.new_text, bytes(t.token_id for t in o.logprobs).decode(), o.finish_reason) for o in found]


@pytest.mark.parametrize("request_id", ["a", "a~1"])
def test_log_probabilities_leave_with_their_text(request_id: str) -> None:
    """Also when the request goes on under another id, because the import under its own cannot be ended."""
    assert run(b"xSTyz", request_id=request_id, stop=("STOP",)) == [
        ("x", "x", None), ("", "", None), ("", "", None), ("STy", "STy", None), ("z", "z", FinishReason.LENGTH)]
    assert run(b"xSTOPyz", request_id=request_id, stop=("STOP",))[-1] == ("", "", FinishReason.STOP)


def test_why_an_answer_ends() -> None:
    assert run(b"ab\0c")[-1] == ("", "", FinishReason.STOP)
    assert run(b"ab\0c", ignore_eos=True)[-1][2] is FinishReason.LENGTH
    assert run(b"abc", stop_token_ids=(98,))[-1] == ("", "", FinishReason.STOP)
