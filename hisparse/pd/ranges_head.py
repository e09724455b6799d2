"""Ranges of memory in front of an agent's metadata: magic, fields, count, ranges, then the rest as it was."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from hisparse.errors import InvariantError, TransferError

MAX_RANGES = 4096
Values = tuple[Any, ...]


class RangesHead:
    """One binary form, little-endian. What a peer sent is checked before anything of it is used; ranges are not.

    Args:
        magic: 4 bytes, of this form and version. what: the ranges are, for errors. range_format: of one, as in `struct`.
        fields_format: of what is said once, in front of the count.
    """

    def __init__(self, magic: bytes, what: str, *, range_format: str, fields_format: str = "") -> None:
        self._magic, self._what = magic, what
        self._fields, self._range = struct.Struct("<" + fields_format), struct.Struct("<" + range_format)
        self._count = struct.Struct("<I")
        self._head_bytes = len(magic) + self._fields.size + self._count.size

    def begins(self, data: bytes) -> bool:
        """Whether the data has this head, whole or not."""
        return data.startswith(self._magic)

    def pack(self, ranges: Sequence[Values], rest: bytes, fields: Values = ()) -> bytes:
        """Raises InvariantError: more ranges than `unpack` takes."""
        if len(ranges) > MAX_RANGES:
            raise InvariantError(f"{len(ranges)} {self._what} for one agent's metadata, which takes {MAX_RANGES}; "
                                 "register slabs, not pages")
        return b"".join((self._magic, self._fields.pack(*fields), self._count.pack(len(ranges)),
                         *(self._range.pack(*item) for item in ranges), rest))

    def unpack(self, data: bytes) -> tuple[Values, list[Values], bytes]:
        """The fields, the ranges, and the rest.

        Raises:
            TransferError: it is something else, has too many ranges, or is cut off.
        """
        if not self.begins(data):
            raise TransferError(f"agent metadata begins with {data[:len(self._magic)]!r}, expected {self._magic!r} and "
                                f"{self._what}: both sides must run the same version")
        if len(data) < self._head_bytes:
            raise TransferError(f"agent metadata of {len(data)} bytes ends within its head of {self._head_bytes}")
        (count,) = self._count.unpack_from(data, self._head_bytes - self._count.size)
        if count > MAX_RANGES:
            raise TransferError(f"agent metadata names {count} {self._what}, at most {MAX_RANGES} are taken")
        end = self._head_bytes + count * self._range.size
        if len(data) < end:
            raise TransferError(f"agent metadata of {len(data)} bytes ends within its {count} {self._what}, which need {end}")
        return (self._fields.unpack_from(data, len(self._magic)),
                list(self._range.iter_unpack(data[self._head_bytes : end])), data[end:])
