"""Page keys: a SHA-256 chain over tokens and typed extra keys, equal in every process and after every restart."""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hisparse.errors import RequestError

KEY_BYTES = 32
_VERSION = b"hisparse-page-key-v2"
_FIELDS = ("lora_id", "cache_salt", "multimodal_hash")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraKeys:
    """What besides tokens makes KV different. None and the empty string are different values."""

    lora_id: str | None = None
    cache_salt: str | None = None
    multimodal_hash: str | None = None


def root_key(layout_fingerprint: str, extra: ExtraKeys) -> bytes:
    """Parent of page 0: every field with its name, presence and length, so that no two inputs encode alike.

    Example: lora "X" without salt and salt "X" without lora give different keys.
    """
    digest = hashlib.sha256(_VERSION)
    _put(digest, "layout", layout_fingerprint)
    for name in _FIELDS:
        _put(digest, name, getattr(extra, name))
    return digest.digest()


def _put(digest: hashlib._Hash, name: str, value: str | None) -> None:
    for part in (name.encode(), None if value is None else value.encode()):
        digest.update(b"\0" if part is None else b"\1" + struct.pack("<Q", len(part)) + part)


def prompt_digest(row_fingerprint: str, extra: ExtraKeys, token_ids: Sequence[int]) -> str:
    """What a prompt's KV depends on, as 64 hex digits; whoever reads KV of a peer checks that it is of his prompt.

    Args:
        row_fingerprint: of the layout; peers may cut the same rows into other pages.
    """
    return hashlib.sha256(root_key(row_fingerprint, extra) + np.asarray(token_ids, dtype="<i8").tobytes()).hexdigest()


class PageKeys:
    """Keys of the full pages of one growing token list. `keys[i]` covers tokens [0, (i + 1) * block_size).

    With `enabled=False` only counts tokens. A key is SHA-256(parent key, the page's tokens as little-endian uint32).
    """

    __slots__ = ("_parent", "_tail", "block_size", "enabled", "keys", "num_tokens")

    def __init__(self, block_size: int, root: bytes, *, enabled: bool = True) -> None:
        self.block_size = block_size
        self.enabled = enabled
        self.keys: list[bytes] = []
        self.num_tokens = 0
        self._parent = root
        self._tail: list[int] = []

    def copy(self) -> PageKeys:
        """An independent chain with the same tokens so far."""
        other = PageKeys(self.block_size, self._parent, enabled=self.enabled)
        other.keys, other.num_tokens, other._tail = list(self.keys), self.num_tokens, list(self._tail)
        return other

    def extend(self, token_ids: Sequence[int]) -> bool:
        """Appends tokens; hashes every page that became full. True: there was one.

        Raises:
            RequestError: a token id outside 0..2**32-1; nothing was appended.
        """
        tail = self._tail
        if not self.enabled:
            self.num_tokens += len(token_ids)
            return False
        if len(tail) + len(token_ids) < self.block_size:
            tail.extend(token_ids)
            self.num_tokens += len(token_ids)
            return False
        tokens = [*tail, *token_ids] if tail else token_ids
        num_hashed = len(tokens) // self.block_size * self.block_size
        data = _little_endian(tokens[:num_hashed])
        self.num_tokens += len(token_ids)
        page_bytes = self.block_size * 4
        parent, sha256 = self._parent, hashlib.sha256
        for first in range(0, len(data), page_bytes):
            parent = sha256(parent + data[first : first + page_bytes]).digest()
            self.keys.append(parent)
        self._parent = parent
        self._tail = list(tokens[num_hashed:])
        return True


def _little_endian(token_ids: Sequence[int]) -> bytes:
    try:
        words = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise RequestError(f"token ids must be integers in 0..{2**32 - 1}: {error}", field="prompt") from error
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
