"""The first bytes of a host pool: what it is, and a header per page. Then, page-aligned, the body."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import numpy as np

from hisparse.errors import ConfigError
from hisparse.layout import KVCacheLayout

PAGE_BYTES = mmap.PAGESIZE
KEY_BYTES = 32
PAGE_HEADER = np.dtype(
    [("key", np.uint8, (KEY_BYTES,)), ("row_mask", "<u8"), ("generation", "<u8"), ("incarnation", "<u8")]
)
HEAD = struct.Struct("<8s32sQQQ")
"""Magic, layout fingerprint, number of blocks, offset of the body, ready flag."""
MAGIC = b"hisparp1"


def body_offset(num_blocks: int) -> int:
    """Page-aligned, behind one page for the head and the page headers."""
    return PAGE_BYTES + -(-num_blocks * PAGE_HEADER.itemsize // PAGE_BYTES) * PAGE_BYTES


def total_bytes(layout: KVCacheLayout, num_blocks: int) -> int:
    if num_blocks < 2:
        raise ConfigError(f"a host pool needs at least 2 pages (one is the null block), got {num_blocks}")
    body = num_blocks * layout.host_block_bytes
    return body_offset(num_blocks) + -(-body // PAGE_BYTES) * PAGE_BYTES


def write_head(memory: mmap.mmap, layout: KVCacheLayout, num_blocks: int) -> None:
    """The ready flag is part of the last write of whoever makes the pool."""
    memory[: HEAD.size] = HEAD.pack(MAGIC, layout.fingerprint().encode(), num_blocks, body_offset(num_blocks), 1)


def head_problem(head: bytes, layout: KVCacheLayout, num_blocks: int, path: Path) -> str:
    """Why a pool is not ready yet ('' = it is). Raises ConfigError when it never will be."""
    if len(head) < HEAD.size or head[:8] == bytes(8):
        return "its owner has not finished creating it"
    magic, fingerprint, blocks, body, ready = HEAD.unpack(head)
    if magic != MAGIC:
        raise ConfigError(f"{path} is no host pool of this version (it begins with {magic!r}); keeper and ranks "
                          "must be of the same version of hisparse")
    if fingerprint != layout.fingerprint().encode() or blocks != num_blocks or body != body_offset(num_blocks):
        raise ConfigError(
            f"the shared host pool {path} holds {blocks} pages of layout {fingerprint.decode()}, expected {num_blocks} of "
            f"{layout.fingerprint()}; every rank must use the configuration its keeper has"
        )
    return "" if ready else "its owner has not finished creating it"
