"""Checks of single fields that a peer sent: type, range, length. A failure is a ProtocolError that names the field."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hisparse.errors import ProtocolError
from hisparse.pd.narrow import HEADER_BYTES, WIDTHS, narrow, widen

MAX_ID_CHARS = 256


def pack_array(values: npt.NDArray[Any]) -> str:
    """int64 or uint64 [n] as text, see `narrow`."""
    return base64.b64encode(narrow(values)).decode()


def unpack_array(text: Any, count: int, what: str, *, zeros: bool = True) -> npt.NDArray[np.uint64]:
    """What `pack_array` was given. Raises ProtocolError for anything else.

    Args:
        zeros: nothing but zeros is legal. They take no bytes for any `count`, so where a peer also said how many there are, one
            list that may not be so has to come first: it bounds the memory of all by the length of the message.
    """
    if not isinstance(text, str):
        raise ProtocolError(f"{what} must be a base64 string, got {type(text).__name__}")
    if len(text) > 4 * (count * max(WIDTHS) + HEADER_BYTES + 2):
        raise ProtocolError(f"{what} is too long for {count} pages")
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ProtocolError(f"{what} is not base64: {error}") from error
    if not zeros and count and raw[:1] == b"\0":
        raise ProtocolError(f"{what} is nothing but zeros")
    return widen(raw, count, what)


def read_mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ProtocolError(f"{what} must be a mapping, got {type(value).__name__}")
    return value


def read_int(source: Mapping[str, Any], name: str, least: int, limit: int) -> int:
    value = source.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < limit:
        raise ProtocolError(f"{name} must be an integer in {least}..{limit - 1}, got {value!r:.80}")
    return value


def read_text(source: Mapping[str, Any], name: str) -> str:
    value = source.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_CHARS:
        raise ProtocolError(f"{name} must be a string of 1..{MAX_ID_CHARS} characters, got {value!r:.80}")
    return value


def read_hex64(source: Mapping[str, Any], name: str) -> int:
    value = read_text(source, name)
    if len(value) != 16 or any(c not in "0123456789abcdef" for c in value):
        raise ProtocolError(f"{name} must be 16 hexadecimal digits, got {value!r:.80}")
    return int(value, 16)
