"""API keys: who may ask, and as which tenant. Only digests of keys are kept, and nothing here prints one."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from pathlib import Path

from hisparse.config import ServeConfig
from hisparse.errors import ConfigError

logger = logging.getLogger(__name__)

_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class KeyRing:
    """The keys of `serve.api_keys` and of `serve.api_keys_file`, which is read again whenever it changes.

    A line of the file is `KEY` or `TENANT KEY`; empty lines and lines that begin with # are skipped. Keys of one tenant
    share cached prefixes; a key without a tenant is its own.

    Raises:
        ConfigError: the file cannot be read, has a malformed line, or no key; names file and line, never their content.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._fixed = [(_digest(key.get_secret_value()), "") for key in config.api_keys]
        self._path = None if config.api_keys_file is None else Path(config.api_keys_file)
        self._stamp: tuple[int, ...] | None = None
        self._from_file: list[tuple[bytes, str]] = []
        self._problem = ""
        if self._path is not None:
            self._stamp = _stamp(self._path)
            self._from_file = _read(self._path)

    def __bool__(self) -> bool:
        """Whether keys are asked for at all."""
        return bool(self._fixed) or self._path is not None

    def tenant(self, given: str) -> str | None:
        """Of the key a client sent; None = not one of ours. Every key is compared, in constant time."""
        self._refresh()
        asked = _digest(given)
        found = None
        for digest, tenant in (*self._fixed, *self._from_file):
            if hmac.compare_digest(asked, digest):
                found = tenant or f"key-{hashlib.sha256(b'tenant' + digest).hexdigest()[:16]}"
        return found

    def _refresh(self) -> None:
        if self._path is None:
            return
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._from_file, self._problem = _read(self._path), ""
            logger.info("%s has changed: %d API keys from now on", self._path, len(self._from_file))
        except ConfigError as error:  # the file is being replaced, or broken: the keys so far stay in force
            if str(error) != self._problem:
                logger.error("%s; the %d keys read before stay in force", error, len(self._from_file))
            self._problem = str(error)


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        state = path.stat()
    except OSError as error:
        raise ConfigError(f"serve.api_keys_file: cannot read {path}: {error.strerror}") from error
    return (state.st_ino, state.st_mtime_ns, state.st_size)


def _read(path: Path) -> list[tuple[bytes, str]]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"serve.api_keys_file: cannot read {path}: {type(error).__name__}") from None
    keys = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or line.lstrip().startswith("#"):
            continue
        if len(words) > 2 or (len(words) == 2 and not _TENANT.fullmatch(words[0])):
            raise ConfigError(f"serve.api_keys_file: line {number} of {path} is neither 'KEY' nor 'TENANT KEY' (a tenant has 1 "
                              "to 64 letters, digits, '.', '_', '-')")
        keys.append((_digest(words[-1]), words[0] if len(words) == 2 else ""))
    if not keys:
        raise ConfigError(f"serve.api_keys_file: {path} has no key; write one a line")
    return keys


def tenant_salt(tenant: str | None, salt: str | None) -> str | None:
    """What a request's prefixes are keyed with: two tenants never share one, whatever salts they choose.

    Args:
        tenant: None = no keys are in use, or all tenants share prefixes. salt: the client's `cache_salt`.
    """
    return salt if tenant is None else f"{tenant}\n{salt or ''}"
