"""API keys: what a key ring accepts, what it never shows, and when it reads its file again."""

from __future__ import annotations

import hmac
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from hisparse.config import HiSparseConfig, load_config
from hisparse.errors import ConfigError
from hisparse.serve.keys import KeyRing, tenant_salt

SECRET = "sk-0123456789abcdef"


def ring(**serve: Any) -> KeyRing:
    return KeyRing(load(**serve).serve)


def load(environ: dict[str, str] | None = None, **serve: Any) -> HiSparseConfig:
    return load_config({"model": {"path": "recall"}, "serve": serve}, environ=environ or {})


def test_keys_of_configuration_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# comment\n\nteam-a {SECRET}\nteam-a other-key-of-team-a\nalone\n")
    keys = ring(api_keys_file=str(file))
    assert keys and keys.tenant(SECRET) == keys.tenant("other-key-of-team-a") == "team-a"
    assert keys.tenant("alone") not in (None, "team-a") and keys.tenant("nobody") is None and keys.tenant("") is None
    for text in ("one,two", '["one", "two"]'):
        config = load(environ={"HISPARSE_SERVE__API_KEYS": text})
        found = {KeyRing(config.serve).tenant(key) for key in ("one", "two")}
        assert None not in found and len(found) == 2
    assert not ring()


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys are compared whatever matches, as digests of one length, by the standard library's comparison."""
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def spy(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return real(a, b)

    keys = ring(api_keys=["a", "bb" * 30, "c"])
    monkeypatch.setattr(hmac, "compare_digest", spy)
    for given in ("a", "c", "wrong", "", "x" * 1000, "ké"):
        compared.clear()
        keys.tenant(given)
        assert compared == [(32, 32)] * 3


def test_a_key_is_nowhere_in_print(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    config = load(api_keys=[SECRET])
    shown = [repr(config), str(config), str(config.model_dump()), config.model_dump_json(), repr(config.serve),
             repr(vars(KeyRing(config.serve))), str(KeyRing(config.serve).tenant(SECRET))]
    assert not any(SECRET in text for text in shown)
    for again in (load_config(config.model_dump(), environ={}), config.for_role("decode"), pickle.loads(pickle.dumps(config))):
        assert KeyRing(again.serve).tenant(SECRET), "a copied configuration still has the key"


@pytest.mark.parametrize("serve", [
    {"api_keys": 12345678901}, {"api_keys": [12345678901]}, {"api_keys": {"k": "12345678901"}}, {"api_keys": ["12345678901 x"]},
    {"api_key": "12345678901"}, {"api_keys": ["12345678901"], "host": "0.0.0.0", "port": "x"},
    {"api_keys": "12345678901", "wat": 1},
])
def test_errors_name_the_option_and_not_the_key(serve: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        load(**serve)
    assert "serve" in str(raised.value) and "12345678901" not in str(raised.value)


@pytest.mark.parametrize(("content", "text"), [
    (None, "cannot read .*No such file"), ("", "has no key"), ("# only this\n", "has no key"),
    ("a b SECRETPART\n", "line 1"), ("ok\nbad/tenant SECRETPART\n", "line 2"), (b"\xff\xfe SECRETPART", "cannot read"),
], ids=["missing", "empty", "comment", "three words", "tenant", "binary"])
def test_bad_files(tmp_path: Path, content: str | bytes | None, text: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=text) as raised:
        ring(api_keys_file=str(file))
    assert "api_keys_file" in str(raised.value) and "SECRETPART" not in str(raised.value)


def test_a_changed_file_is_read_again_and_a_broken_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("old-key\n")
    keys = ring(api_keys_file=str(file))
    new = tmp_path / "new"
    new.write_text("new-key\nsecond\n")
    os.replace(new, file)  # as editors and Kubernetes do
    assert keys.tenant("new-key") and keys.tenant("old-key") is None
    file.write_text("too many words here\n")
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert keys.tenant("new-key"), "rather the keys from before than none"
    assert len(caplog.records) == 1, "said once, not at every request"
    assert "stay in force" in caplog.text and "too many words" not in caplog.text
    file.unlink()
    assert keys.tenant("new-key") and keys.tenant("old-key") is None


def test_salts_of_tenants_never_meet() -> None:
    pairs = [(tenant, salt) for tenant in ("a", "b", "a.b") for salt in (None, "x", "b", "\nx", "a\nx")]
    salts = [tenant_salt(tenant, salt) for tenant, salt in pairs]
    assert len(set(salts)) == len(pairs)
    assert tenant_salt(None, None) is None and tenant_salt(None, "x") == "x"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_other_machines_need_keys(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reachable from other machines and no API keys are set; set api_keys_file"):
        load(host=host)
    for serve in ({"api_keys": ["k"]}, {"api_keys_file": "/run/keys"}, {"allow_no_keys": True}):
        assert load(host=host, **serve).serve.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.53"])
def test_this_machine_needs_none(host: str) -> None:
    assert load(host=host).serve.host == host
