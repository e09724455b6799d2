"""Text increments: whole characters only, stop strings never leak, and the pieces add up to the whole."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from hisparse.engine.detokenizer import Detokenizer
from hisparse.engine.tokenizer import Tokenizer


class Bytes:
    """Token id = byte."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf8", errors="replace")


class Words:
    """A decoder that drops the blank of the first word, as some tokenizers do."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(f"w{i}" for i in token_ids)


def feed(detokenizer: Detokenizer, text: str | bytes) -> list[str]:
    data = text.encode() if isinstance(text, str) else text
    return [detokenizer.push([byte]) for byte in data]


def test_a_character_appears_with_its_last_byte() -> None:
    assert feed(Detokenizer(Bytes()), "aé€😀b") == ["a", "", "é", "", "", "€", "", "", "", "😀", "b"]


def test_context_tokens_give_the_blank_between_words() -> None:
    detokenizer = Detokenizer(Words(), prompt_ids=[1, 2])
    assert [detokenizer.push([i]) for i in (3, 4)] == [" w3", " w4"]


def test_invalid_bytes_come_out_as_replacement_characters_and_do_not_block() -> None:
    detokenizer = Detokenizer(Bytes())
    out = "".join(feed(detokenizer, b"a\xff\xffb" + b"\x80" * 100 + b"c")) + detokenizer.finish()
    assert out == "a\ufffd\ufffdb" + "\ufffd" * 100 + "c"


def test_an_unfinished_character_is_flushed_at_the_end() -> None:
    detokenizer = Detokenizer(Bytes())
    assert "".join(feed(detokenizer, "ok€".encode()[:-1])) == "ok"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_a_stop_string_that_spans_tokens_never_leaks() -> None:
    detokenizer = Detokenizer(Bytes(), stop=["</end>"])
    assert "".join(feed(detokenizer, "text </e")) == "text "
    assert "".join(feed(detokenizer, "m>")) == "</em>", "not the stop string after all"
    assert "".join(feed(detokenizer, " x</end> more")) == " x"
    assert detokenizer.stopped == "</end>"
    assert detokenizer.finish() == "" and detokenizer.push([65]) == ""


def test_a_stop_inside_one_increment_cuts_it_and_the_earliest_wins() -> None:
    detokenizer = Detokenizer(Bytes(), stop=["zz", "b", "abc"])
    assert detokenizer.push(list(b"xabczz")) == "x"
    assert detokenizer.stopped == "abc"


def test_overlapping_repeats_of_a_prefix_are_held_back() -> None:
    detokenizer = Detokenizer(Bytes(), stop=["aab"])
    assert feed(detokenizer, "aaaab") == ["", "", "a", "a", ""]
    assert detokenizer.stopped == "aab"


def test_held_text_is_released_when_the_request_ends() -> None:
    detokenizer = Detokenizer(Bytes(), stop=["\n\n"])
    assert "".join(feed(detokenizer, "a\n")) == "a"
    assert detokenizer.finish() == "\n" and detokenizer.stopped is None


def test_a_stop_string_of_wide_characters() -> None:
    detokenizer = Detokenizer(Bytes(), stop=["終わり"])
    assert "".join(feed(detokenizer, "です終わる終わり!")) == "です終わる"
    assert detokenizer.stopped == "終わり"


@pytest.mark.parametrize("seed", range(20))
def test_increments_add_up_to_the_text_before_the_first_stop(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab\né😀") for _ in range(200))
    stop = ["".join(rng.choice("ab\né") for _ in range(rng.randint(2, 5))) for _ in range(2)]
    detokenizer = Detokenizer(Bytes(), stop=stop)
    data, out = list(text.encode()), ""
    while data:
        size = rng.randint(1, 4)
        out += detokenizer.push(data[:size])
        data = data[size:]
        for string in stop:
            assert string not in out
    out += detokenizer.finish()
    ends = [at for string in stop if (at := text.find(string)) >= 0]
    assert out == text[: min(ends, default=len(text))]


def test_a_real_tokenizer_token_by_token(tiny_checkpoints) -> None:
    tokenizer = Tokenizer(tiny_checkpoints["glm5"])
    text = "def f(x):\n    return 'naïve — 終わり 😀'  # done\n"
    ids = tokenizer.encode(text)
    assert len(ids) > 30
    detokenizer = Detokenizer(tokenizer, prompt_ids=ids[:3])
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.finish() == text


def test_tokens_are_released_with_their_whole_text() -> None:
    detokenizer = Detokenizer(Bytes(), stop=["</end>"])
    counts = []
    for byte in "é<x</e":
        detokenizer.push(list(byte.encode())[:1])
        counts.append(detokenizer.take_released())
        for rest in list(byte.encode())[1:]:
            detokenizer.push([rest])
            counts.append(detokenizer.take_released())
    assert counts == [0, 2, 0, 2, 0, 0, 0], "both bytes of a character together; held text not yet"
    detokenizer.push(list(b"nd>z"))
    assert detokenizer.stopped == "</end>" and detokenizer.take_released() == 0


class Pieces:
    """Token id = index of a piece of text."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self.pieces[i] for i in token_ids)


def test_a_token_that_runs_into_the_stop_string_is_not_released() -> None:
    detokenizer = Detokenizer(Pieces("one ", "two ST", "OP"), stop=["STOP"])
    out = [(detokenizer.push([i]), detokenizer.take_released()) for i in range(3)]
    assert out == [("one ", 1), ("two ", 0), ("", 0)]


@pytest.mark.parametrize("seed", range(20))
def test_released_tokens_are_those_that_end_within_the_text_so_far(seed: int) -> None:
    """The plain model: a token's end is the length of the text once its last character is whole."""
    rng = random.Random(seed)
    pieces = ["".join(rng.choice("ab\n") for _ in range(rng.randint(0, 4))) for _ in range(60)]
    stop = ["".join(rng.choice("ab\n") for _ in range(rng.randint(2, 6))) for _ in range(2)]
    detokenizer, out, released = Detokenizer(Pieces(*pieces), stop=stop), "", 0
    ends = [len("".join(pieces[: i + 1])) for i in range(60)]
    for i in range(60):
        out += detokenizer.push([i])
        released += detokenizer.take_released()
        if detokenizer.stopped is not None:
            break
        assert released == sum(end <= len(out) for end in ends[: i + 1])
    out += detokenizer.finish()
    released += detokenizer.take_released()
    assert released == sum(end <= len(out) for end in ends[: i + 1])
