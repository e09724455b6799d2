"""Answers of the prefill side: which pages decode may read, under which lease, and what decode says about them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hisparse.errors import InvariantError, ProtocolError
from hisparse.layout import KVCacheLayout
from hisparse.pd.endpoint import RankEndpoint
from hisparse.pd.leases import LeaseTable
from hisparse.pd.pages import table_of
from hisparse.pd.protocol import decode_notice, encode_params
from hisparse.types import PageGenerations, RequestPages

_log = logging.getLogger(__name__)


class Grants:
    """Args: fingerprint: of the layout.

    Attributes:
        endpoints: of the own ranks, by rank; needed before the first grant. bad_notices: that could not be read.
    """

    def __init__(self, layout: KVCacheLayout, leases: LeaseTable, *, engine_id: str, lease_s: float, fingerprint: str) -> None:
        self._layout, self._leases = layout, leases
        self._engine_id, self._lease_s, self._fingerprint = engine_id, lease_s, fingerprint
        self.endpoints: tuple[RankEndpoint, ...] = ()
        self.bad_notices = 0
        self._next_lease = 1

    def grant(self, request_id: str, pages: RequestPages, generations: PageGenerations, *, prompt_digest: str,
              incarnation: int) -> Mapping[str, Any]:
        """Leases the pages (first_page must be 0) of the prompt named and returns `kv_transfer_params`: JSON types only.

        An empty page list gives parameters that decode refuses, and the request's lease has ended at once.
        """
        if not self.endpoints:
            raise InvariantError("grant before set_endpoints: peers could not reach the pages")
        if pages.first_page != 0:
            raise InvariantError(f"request {request_id}: only whole prompts can be leased, got pages from {pages.first_page}")
        empty = pages.num_pages == 0 or pages.num_tokens == 0
        if not empty and pages.num_pages != self._layout.pages(pages.num_tokens):
            raise InvariantError(f"request {request_id}: {pages.num_pages} pages for {pages.num_tokens} tokens, expected "
                                 f"{self._layout.pages(pages.num_tokens)}")
        lease_id, self._next_lease = f"{incarnation:016x}-{self._next_lease}", self._next_lease + 1
        if empty:
            self._leases.end_unopened(request_id)
        else:
            self._leases.open(lease_id, request_id, self._lease_s)
        return encode_params(
            layout=self._layout, fingerprint=self._fingerprint, engine_id=self._engine_id, incarnation=incarnation,
            lease_id=lease_id, lease_s=self._lease_s, num_tokens=0 if empty else pages.num_tokens,
            prompt_digest=prompt_digest, endpoints=self.endpoints, table=table_of(pages, generations))

    def hear(self, payload: bytes) -> None:
        """A notice of a decode engine. One that cannot be read is counted."""
        try:
            notice = decode_notice(payload)
        except ProtocolError as error:
            self.bad_notices += 1
            _log.warning("a peer's notice was ignored: %s", error)
            return
        if notice.kind == "release":
            self._leases.release(notice.lease_id)
        else:
            self._leases.renew(notice.lease_id)
