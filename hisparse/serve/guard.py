"""What stands before every endpoint: the caller's key, and no strangers where there are no keys. And the measuring of it.

Both are plain ASGI layers, so a new endpoint is guarded and measured without doing anything, and streams pass untouched.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import time
import uuid
from typing import Any

from starlette.responses import JSONResponse

from hisparse.metrics.request_feed import CLIENT_LEFT, HttpFeed
from hisparse.serve.errors import ApiError
from hisparse.serve.keys import KeyRing

OPEN_PATHS = ("/health", "/residency")
"""For probes, which have no key: what strangers learn there is one word. And the static page that asks for a key."""
TENANT = "hisparse.tenant"
"""Where a request's scope has the tenant; absent = the caller gave no valid key."""
REQUEST_ID = "hisparse.request_id"
"""Where a request's scope has its id, which is distinct and begins with the id that its X-Request-Id named, if any."""
_HEAD = "hisparse.head"
_NAMED = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Guard:
    """Refuses with 401 who has no valid key, or, where no keys are configured, with 403 who is not on this machine."""

    def __init__(self, app: Any, *, keys: KeyRing, allow_no_keys: bool) -> None:
        self._app, self._keys, self._allow_no_keys = app, keys, allow_no_keys

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            try:
                self._admit(scope)
            except ApiError as error:
                await JSONResponse(error.body(), error.status, headers=error.headers())(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admit(self, scope: Any) -> None:
        is_open = _path(scope) in OPEN_PATHS
        if not self._keys:
            if not is_open and not self._allow_no_keys and not is_local(scope.get("client")):
                raise ApiError(403, "this service has no API keys, so it answers only clients on its own machine; its operator "
                                    "can set serve.api_keys_file, or serve.allow_no_keys behind a gateway of their own",
                               code="no_api_keys")
            host = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1")
            if not is_open and not self._allow_no_keys and not is_own_name(host):
                raise ApiError(403, "this service has no API keys, so it answers only to an address or a local name, which no "
                                    "web page can claim; ask http://127.0.0.1, or set serve.api_keys_file", "Host",
                               "foreign_host")
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.decode("utf-8", "replace").partition(" ")
        tenant = self._keys.tenant(key.strip())
        if tenant is not None and scheme.lower() == "bearer":
            scope[TENANT] = tenant
        elif not is_open:
            raise ApiError(401, "missing or wrong API key; send 'Authorization: Bearer KEY'")


def is_local(client: Any) -> bool:
    """Whether a peer is on this machine; one without an address (a UNIX socket) is, one with an odd address is not."""
    if client is None:
        return True
    try:
        address = ipaddress.ip_address(client[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def is_own_name(host: str) -> bool:
    """Whether a Host header is an address, `localhost` or a name without a domain. A page on the web that had its own name
    resolve to this machine (DNS rebinding) would send that name, and could then read what we answer."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    name = name.strip("[]").rstrip(".").lower()
    if "." not in name and ":" not in name:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.endswith(".localhost")
    return True


class Measured:
    """Counts and times every HTTP request, streams to their end; gives each an id, which its answer's head and logs name.

    Args:
        proxied: a proxy in front names the request and puts that X-Request-Id into the answer, as Ray Serve's does.
    """

    def __init__(self, app: Any, *, feed: HttpFeed, proxied: bool = False) -> None:
        self._app, self._feed, self._proxied = app, feed, proxied

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, status, ended = time.monotonic(), CLIENT_LEFT, False

        named = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        named = named if _NAMED.fullmatch(named) else ""
        scope[REQUEST_ID] = f"{named}-{secrets.token_hex(4)}" if named else uuid.uuid4().hex
        scope[_HEAD] = {"X-Content-Type-Options": "nosniff"}
        if not self._proxied:
            scope[_HEAD]["X-Request-Id"] = named or scope[REQUEST_ID]
        head = [(name.lower().encode(), value.encode()) for name, value in scope[_HEAD].items()]

        async def sending(message: Any) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
                message = message | {"headers": [*message.get("headers", ()), *head]}
            ended = ended or (message["type"] == "http.response.body" and not message.get("more_body"))
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:  # answered above this layer
            status, ended = 500, True
            raise
        finally:
            self._feed.answered(_path(scope), status if ended else CLIENT_LEFT, time.monotonic() - began_s)


def head_of(scope: Any) -> dict[str, str]:
    """Headers of every answer; for one that passes no layer of ours."""
    return dict(scope.get(_HEAD, {}))


def _path(scope: Any) -> str:
    return str(scope["path"]).removeprefix(scope.get("root_path", "")) or "/"
