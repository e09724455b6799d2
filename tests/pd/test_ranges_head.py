"""The head in front of an agent's metadata, of both kinds: what is sent arrives, and what nobody sent is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.errors import InvariantError, TransferError
from hisparse.pd.mapped_reads import _HEAD as EXPORTED
from hisparse.pd.ranges_head import MAX_RANGES, RangesHead
from hisparse.pd.registered import _HEAD as REGISTERED

KINDS = {"registered": (REGISTERED, (), (4096, 100, -1)), "exported": (EXPORTED, (b"h" * 36,), (4096, 100, b"x" * 64, 16))}
HEADS = pytest.mark.parametrize("kind", KINDS)


@HEADS
@pytest.mark.parametrize("count", [0, 1, 65, MAX_RANGES])
@pytest.mark.parametrize("rest", [b"", b"agent", b"HSR1"])
def test_ranges_and_the_rest_arrive(kind: str, count: int, rest: bytes) -> None:
    head, fields, item = KINDS[kind]
    assert head.unpack(head.pack([item] * count, rest, fields)) == (fields, [item] * count, rest)


def test_the_bytes_on_the_wire() -> None:
    assert REGISTERED.pack([(1, 2, -1)], b"agent") == b"HSR1" + struct.pack("<I", 1) + struct.pack("<QQi", 1, 2, -1) + b"agent"
    assert EXPORTED.pack([(1, 2, b"x" * 64, 3)], b"agent", (b"h" * 36,)) == (
        b"HSM1" + b"h" * 36 + struct.pack("<I", 1) + struct.pack("<QQ64sQ", 1, 2, b"x" * 64, 3) + b"agent")


@HEADS
def test_a_head_that_is_cut_off_anywhere_is_refused(kind: str) -> None:
    head, fields, item = KINDS[kind]
    data = head.pack([item] * 3, b"", fields)
    for end in range(len(data)):
        with pytest.raises(TransferError, match=r"agent metadata (begins with|of \d+ bytes ends within)"):
            head.unpack(data[:end])


@HEADS
def test_too_many_ranges_are_refused_on_both_sides(kind: str) -> None:
    head, fields, item = KINDS[kind]
    with pytest.raises(InvariantError, match=f"4097 .* takes {MAX_RANGES}"):
        head.pack([item] * (MAX_RANGES + 1), b"", fields)
    data = bytearray(head.pack([], bytes(1 << 20), fields))
    at = 4 + sum(len(field) for field in fields)
    data[at : at + 4] = struct.pack("<I", MAX_RANGES + 1)
    with pytest.raises(TransferError, match=f"names 4097 .* at most {MAX_RANGES}"):
        head.unpack(bytes(data))


@HEADS
def test_another_version_is_told(kind: str) -> None:
    head, fields, item = KINDS[kind]
    data = head.pack([item], b"", fields)
    with pytest.raises(TransferError, match=r"begins with b'HS.0', expected b'HS.1' .* same version"):
        head.unpack(data[:3] + b"0" + data[4:])


@given(st.binary(max_size=300))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    for head in (REGISTERED, EXPORTED, RangesHead(b"", "of nothing", range_format="Q")):
        try:
            fields, ranges, rest = head.unpack(data)
        except TransferError:
            continue
        assert head.pack(ranges, rest, fields) == data
