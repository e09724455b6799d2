"""Page keys: typed extra keys, chain, equality across processes."""

from __future__ import annotations

import itertools
import subprocess
import sys

import hypothesis.strategies as st
from hypothesis import given, settings

from hisparse.cache.prefix import ExtraKeys, PageKeys, prompt_digest, root_key


def keys(tokens: list[int], extra: ExtraKeys | None = None, *, block_size: int = 64, fingerprint: str = "f") -> list[bytes]:
    chain = PageKeys(block_size, root_key(fingerprint, extra or ExtraKeys()))
    chain.extend(tokens)
    return chain.keys


def test_b23_extra_keys_are_typed() -> None:
    """Adapter "X" without salt and salt "X" without adapter must not share a page."""
    tokens = list(range(64))
    values = [None, "", "X", "Y"]
    extras = [ExtraKeys(lora_id=a, cache_salt=b, multimodal_hash=c) for a, b, c in itertools.product(values, repeat=3)]
    assert len({keys(tokens, extra)[0] for extra in extras}) == len(extras) == 64
    assert keys(tokens, ExtraKeys(lora_id="X"))[0] != keys(tokens, ExtraKeys(cache_salt="X"))[0]
    assert keys(tokens, ExtraKeys(lora_id="ab", cache_salt="c")) != keys(tokens, ExtraKeys(lora_id="a", cache_salt="bc"))


def test_b23_keys_are_equal_in_every_process() -> None:
    code = ("from hisparse.cache.prefix import *; k = PageKeys(64, root_key('f', ExtraKeys()));"
            "k.extend(list(range(200))); print(''.join(x.hex() for x in k.keys))")
    seen = {
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True,
                       check=True).stdout for seed in ("0", "1", "random", "77")
    }
    assert seen == {"".join(key.hex() for key in keys(list(range(200)))) + "\n"}


def test_known_value_never_changes() -> None:
    """Keys live in pools that outlive processes: a change of the encoding must be a change of the version."""
    assert keys([1, 2, 3, 4], block_size=4, fingerprint="layout")[0].hex() == (
        "9ffd16efc71af0ca18ff64dd428dd804c521cc23f99b7c5b478640da4302a276")


def test_keys_chain_and_depend_on_the_layout() -> None:
    a, b = keys([1] * 128), keys([2] + [1] * 127)
    assert a[0] != b[0] and a[1] != b[1], "a page's key covers everything before it"
    assert a[0] != a[1]
    assert keys([1] * 64, fingerprint="f") != keys([1] * 64, fingerprint="g")


def test_only_full_pages_have_keys() -> None:
    chain = PageKeys(64, root_key("f", ExtraKeys()))
    chain.extend([5] * 63)
    assert chain.keys == [] and chain.num_tokens == 63
    chain.extend([5])
    assert len(chain.keys) == 1


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.integers(0, 2**31), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=5))
def test_growing_in_pieces_gives_the_same_keys(tokens: list[int], cuts: list[int]) -> None:
    chain = PageKeys(8, root_key("f", ExtraKeys()))
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    for first, end in itertools.pairwise(edges):
        chain.extend(tokens[first:end])
    assert chain.keys == keys(tokens, block_size=8)


def test_prompt_digests_tell_prompts_and_salts_apart() -> None:
    salted = ExtraKeys(cache_salt="a")
    digests = {prompt_digest("layout", extra, ids) for extra in (ExtraKeys(), salted) for ids in ([1, 2], [2, 1], [1, 2, 3])}
    digests.add(prompt_digest("other layout", salted, [1, 2]))
    assert len(digests) == 7
    assert prompt_digest("layout", salted, (1, 2)) in digests
