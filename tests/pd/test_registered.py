"""Which memory a peer registered: on the wire, and looked up for a READ."""

from __future__ import annotations

import numpy as np
import pytest

from hisparse.errors import TransferError
from hisparse.pd.ranges_head import MAX_RANGES
from hisparse.pd.registered import CPU, RegisteredRanges


def ranges() -> RegisteredRanges:
    made = RegisteredRanges()
    made.add(4096, 100, None)
    made.add(1 << 47, 1 << 20, 1)
    made.add(9000, 8, None)
    return made


def device_of(made: RegisteredRanges, *pieces: tuple[int, int]) -> int:
    addresses, sizes = np.array(pieces, dtype=np.int64).T
    return made.device_of(addresses, sizes)


def test_memory_is_found_by_address() -> None:
    made = ranges()
    assert device_of(made, (4096, 100), (4100, 1), (9000, 8)) == CPU
    assert device_of(made, ((1 << 47) + 5, 1 << 10), (1 << 47, 1 << 20)) == 1


@pytest.mark.parametrize("piece", [(4095, 2), (4096, 101), (9001, 8), ((1 << 47) - 1, 1), ((1 << 47) + 1, 1 << 20), (0, 1)])
def test_memory_outside_every_range_is_refused(piece: tuple[int, int]) -> None:
    with pytest.raises(TransferError, match=f"{piece[0]:#x} is not registered"):
        device_of(ranges(), (4096, 1), piece)


def test_one_read_has_one_kind_of_memory_on_a_side() -> None:
    with pytest.raises(TransferError, match=r"several kinds on one side: devices \[-1, 1\]"):
        device_of(ranges(), (4096, 1), (1 << 47, 1))


def test_ranges_travel_in_front_of_the_agents_metadata() -> None:
    far, metadata = RegisteredRanges.unwrap(ranges().wrap(b"agent"))
    assert list(far) == list(ranges()) and metadata == b"agent"
    assert RegisteredRanges.unwrap(RegisteredRanges().wrap(b""))[1] == b""


@pytest.mark.parametrize("data", [
    b"", b"HSR", b"nixl metadata of another version", b"HSR1" + (2).to_bytes(4, "little") + bytes(39),
    b"HSR1" + (MAX_RANGES + 1).to_bytes(4, "little") + bytes(20 * (MAX_RANGES + 1)), b"HSR1\xff\xff\xff\xff",
])
def test_what_no_agent_wrote_is_refused(data: bytes) -> None:
    with pytest.raises(TransferError, match="agent metadata"):
        RegisteredRanges.unwrap(data)
