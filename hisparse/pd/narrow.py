"""Page ids and generations in as few bytes as they need.

One byte of width, eight of the least value, then each value in that many bytes, all little-endian: 0 stays 0, any other value
is how far it lies above the least, plus 1; nothing but zeros takes no bytes. Ids lie within a pool, generations count up from
one incarnation: 3 and 1 to 3 bytes instead of 8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hisparse.errors import ProtocolError

WIDTHS = (0, 1, 2, 3, 4, 8)
HEADER_BYTES = 9


def narrow(values: npt.NDArray[Any]) -> bytes:
    """Of int64 or uint64 values of any shape, flat. Negative ones travel as their two's complement."""
    wide = np.ascontiguousarray(values).reshape(-1).view("<u8")
    there = wide != 0
    least = int(wide[there].min()) if there.any() else 1
    above = np.where(there, wide - np.uint64(least) + np.uint64(1), np.uint64(0))
    most = int(above.max()) if above.size else 0
    width = next(width for width in WIDTHS if most < 1 << 8 * width)
    data = above.view(np.uint8).reshape(-1, 8)[:, :width]
    return bytes([width]) + least.to_bytes(8, "little") + data.tobytes()


def widen(raw: bytes, count: int, what: str) -> npt.NDArray[np.uint64]:
    """uint64 [count], what `narrow` was given.

    Raises:
        ProtocolError: not `count` values, a width that does not exist, or values beyond 64 bits. `what` names the list.
    """
    if len(raw) < HEADER_BYTES or raw[0] not in WIDTHS:
        begin = raw[:1].hex() or "nothing"
        raise ProtocolError(f"{what} begins with {begin} in {len(raw)} bytes; expected a width of {WIDTHS} and a least value")
    width = raw[0]
    if len(raw) - HEADER_BYTES != count * width:
        raise ProtocolError(f"{what} covers {(len(raw) - HEADER_BYTES) / (width or 1):g} pages, expected {count}")
    data = np.zeros((count, 8), dtype=np.uint8)
    data[:, :width] = np.frombuffer(raw, np.uint8, offset=HEADER_BYTES).reshape(count, width)
    above, least = data.reshape(-1).view("<u8"), int.from_bytes(raw[1:HEADER_BYTES], "little")
    if count and int(above.max()) - 1 + least >= 1 << 64:
        raise ProtocolError(f"{what} has values beyond 64 bits")
    return np.where(above != 0, above - np.uint64(1) + np.uint64(least), np.uint64(0)).astype(np.uint64)
