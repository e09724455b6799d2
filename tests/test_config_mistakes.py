"""What a user is told about a configuration: mistakes, other spellings, options without effect; and the reference page."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hisparse.config import Document, HiSparseConfig, hot_rows, kv_layout, load_config
from hisparse.config.effects import RULES
from hisparse.config.loading import warn_once
from hisparse.config.options import options, sections
from hisparse.config.reference import page
from hisparse.config.spellings import SPELLINGS
from hisparse.errors import ConfigError
from tests.test_cli import run

ROOT = Path(__file__).parents[1]
BASE: dict[str, Any] = {"model": {"path": "recall"}}


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """Messages of the logger, as they come."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    warn_once.cache_clear()  # each is told once a process otherwise
    handler = Handler(logging.WARNING)
    logging.getLogger("hisparse").addHandler(handler)
    yield messages
    logging.getLogger("hisparse").removeHandler(handler)


def load(environ: dict[str, str] | None = None, **sections: Any) -> HiSparseConfig:
    return load_config({**BASE, **sections}, environ=environ or {})


# ---- errors


@pytest.mark.parametrize(("text", "words"), [
    ("model: {path: recall}\ncache:\n  blok_size: 64\n", r"cache.blok_size \(line 3\): unknown key; did you mean block_size\?"),
    ("model: {path: recall}\ncache: {port: 1}\n", r"cache.port \(line 2\): unknown key here; it is serve.port"),
    ("model: {path: recall}\nhots_rows: 64\n", r"hots_rows \(line 2\): unknown key; did you mean cache.hot_rows\?"),
    ("model: {path: recall}\nshedule: {}\n", r"shedule \(line 2\): unknown key; did you mean scheduler\?"),
    ("model: {path: recall}\ncache: {zzz: 1}\n", r"cache.zzz \(line 2\): unknown key; cache has block_size"),
    ("model: {path: recall}\nengine: {device_bufer_size: 1}\n", "engine.device_bufer_size .*unknown key; engine has cuda"),
    ("model: {path: recall}\ncache: {device_bufer_size: 1}\n", "did you mean device_buffer_size"),
    ("model: {path: recall}\ncache:\n  watermark: 1.5\n",
     r"cache.watermark \(line 3\): must be less than 1 \(got 1.5; default 0.1\)"),
    ("model: {path: recall, device: gpu}\n", r"model.device \(line 1\): must be 'cpu' or 'cuda'.*got 'gpu'; default cpu"),
    ("model: {path: recall}\ncache: {host_pool: share}\n", r"must be 'auto', 'shared' or 'private'; did you mean shared\?"),
    ("model: {path: recall}\ncache: 5\n", r"cache \(line 2\): must be a section, with an option a line below it: enabled,"),
    ("model: {path: recall}\nprefill:\n  cache:\n    device_bloks: 9\n",
     r"prefill.cache.device_bloks \(line 4\): unknown key; did you mean device_blocks\?"),
    ("model: {path: recall}\nprefill:\n  cache: {watermark: 2}\n", r"prefill.cache.watermark \(line 3\): must be less than 1"),
    ("cache: {}\n", "model: is required; give model"),
    ("model: {name: x}\n", r"model.path \(line 1\): is required"),
    ("", "must be a mapping of sections, got nothing"),
])
def test_errors_say_where_and_what_was_meant(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(path, environ={})
    assert str(caught.value).startswith(f"{path}")


def test_all_mistakes_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load(cache={"block_size": "x", "hotrows": 1}, serve={"port": 99_999}, pd={"lease_s": -1})
    lines = str(caught.value).splitlines()
    assert lines[0] == "invalid configuration:" and len(lines) == 5
    paths = {line.split(":")[0].strip() for line in lines[1:]}
    assert paths == {"cache.block_size", "cache.hotrows", "serve.port", "pd.lease_s"}
    assert "must be less than or equal to 65535 (got 99999; default 8000)" in str(caught.value)


def test_keys_are_never_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        load(serve={"api_keys": ["two words"], "api_key": "secret", "host": "0.0.0.0"})
    assert "two words" not in str(caught.value) and "secret" not in str(caught.value)
    assert "did you mean api_keys?" in str(caught.value)


@pytest.mark.parametrize(("text", "words"), [
    ("model:\n  path: recall\n cache: 3\n", r"c.yaml, line 3, column \d+: not valid YAML: .*\n     cache: 3\n *\^"),
    ("model: {path: recall\n", r"c.yaml, line 2, column 1: not valid YAML"),
    ("model:\n\tpath: recall\n", r"line 2, column 1: not valid YAML: .*spaces, not tabs"),
    ("model: {path: a}\ncache: {}\nmodel: {path: b}\n", r"c.yaml, line 3: model is set twice, first in line 1"),
    ("model:\n  path: a\n  path: b\n", r"line 3: path is set twice, first in line 2"),
    ("model: @x\n", "line 1, column 8"),
])
def test_what_is_no_yaml_has_a_line_and_a_column(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(path, environ={})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name, words in (("none.yaml", "No such file"), ("binary.yaml", "no text"), (".", "directory")):
        with pytest.raises(ConfigError, match=words):
            Document.read(tmp_path / name)


def test_serve_files_keep_their_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                      tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("applications:\n- name: a\n  args:\n    model: {path: recall}\n    cache:\n      hot_row: 64\n")
    assert run(monkeypatch, "serve", str(path), "--dry-run") == 2
    assert f"{path}: invalid configuration:\n  cache.hot_row (line 6): unknown key; did you mean hot_rows?" in (
        capsys.readouterr().err)


# ---- the environment


def test_options_at_the_top_have_variables_and_near_misses_are_told(warned: list[str]) -> None:
    config = load({"HISPARSE_TENSOR_PARALLEL_SIZE": "2", "HISPARSE_PREFILL": "{cache: {device_blocks: 9}}",
                   "HISPARSE_CACHE_HOT_ROWS": "64", "HISPARSE_COMMIT": "x"})
    assert config.tensor_parallel_size == 2 and config.for_role("prefill").cache.device_blocks == 9
    assert config.cache.hot_rows is None
    assert len(warned) == 1 and "HISPARSE_CACHE_HOT_ROWS has no effect" in warned[0] and "HISPARSE_CACHE__HOT_ROWS" in warned[0]
    with pytest.raises(ConfigError, match="the variable HISPARSE_CACHE__HOT_ROWS is not valid YAML"):
        load({"HISPARSE_CACHE__HOT_ROWS": "[1"})


# ---- other spellings


@pytest.mark.parametrize("top", [False, True])
def test_other_spellings_are_understood(warned: list[str], top: bool) -> None:
    given = {"host_pool_gib": 0.5, "device_buffer_size": 512, "eager_host_mirror": True, "top_k": 2048,
             "swap_in_block_size": 512}
    config = load(**given) if top else load(cache=given)
    assert (config.cache.host_pool_gib, config.cache.hot_rows) == (0.5, 512)
    above = "" if top else "cache."
    assert sorted(text.split(" has no effect")[0] for text in warned) == [
        f"{above}eager_host_mirror = True", f"{above}swap_in_block_size = 512", f"{above}top_k = 2048"]


def test_other_spellings_in_every_source(warned: list[str]) -> None:
    config = load_config({**BASE, "device_buffer_size": 64, "prefill": {"cache": {"device_buffer_size": 640}}},
                         {"cache": {"device_buffer_size": 320}}, {"HISPARSE_CACHE__DEVICE_BUFFER_SIZE": "128"})
    assert config.cache.hot_rows == 320 and config.for_role("prefill").cache.hot_rows == 640 and not warned
    for wrong, words in (({"cache": {"hot_rows": 64, "device_buffer_size": 64}}, "mean the same; remove one"),
                         ({"host_pool_gib": 1, "cache": {"host_pool_gib": 2}}, "host_pool_gib and cache.host_pool_gib mean"),
                         ({"cache": {"eager_host_mirror": False}}, "cache.eager_host_mirror = False: rows are always written")):
        with pytest.raises(ConfigError, match=words):
            load(**wrong)


def test_a_ratio_sizes_the_host_pool_of_each_role(warned: list[str]) -> None:
    """The bundled checkpoint: an indexer block and three others for each resident page."""
    from hisparse.config import host_blocks

    config = load(host_to_device_ratio=2.5, cache={"device_blocks": 401}, prefill={"cache": {"device_blocks": 801}})
    decode, prefill = config.for_role("decode"), config.for_role("prefill")
    layout = kv_layout(decode)
    assert layout.num_resident_groups == 3
    assert host_blocks(decode.cache, layout, 64) == 1 + 250 and host_blocks(prefill.cache, layout, 64) == 1 + 500
    with pytest.raises(ConfigError, match=r"host_to_device_ratio = 2.5 holds 251 host pages .*needs at least 252; raise it or"):
        host_blocks(decode.cache, layout, 250 * 64)
    assert not warned
    load(host_to_device_ratio=2.5, cache={"host_pool_gib": 3})
    assert "cache.host_pool_gib has no effect: cache.host_to_device_ratio is set" in warned[0]


# ---- options without effect


@pytest.mark.parametrize(("given", "path"), [
    ({"cache": {"enabled": False, "hot_rows": 512}}, "cache.hot_rows"),
    ({"serve": {"prefill_replicas": 0}, "pd": {"lease_s": 5}}, "pd.lease_s"),
    ({"serve": {"prefill_replicas": 0}, "prefill": {"cache": {"device_blocks": 9}}}, "prefill"),
    ({"pd": {"role": "decode"}}, "pd.role"),
    ({"engine": {"cuda_graphs": False}}, "engine.cuda_graphs"),
    ({"cache": {"position_table": "hashed"}}, "cache.position_table"),
    ({"trace": {"steps": 5}}, "trace.steps"),
    ({"pd": {"kv_load_failure_policy": "fail", "local_prefill_tokens": 5}}, "pd.local_prefill_tokens"),
    ({"serve": {"allow_no_keys": True, "api_keys": ["a"]}}, "serve.allow_no_keys"),
    ({"serve": {"share_prefixes": True}}, "serve.share_prefixes"),
])
def test_a_set_option_without_effect_warns(warned: list[str], given: dict[str, Any], path: str) -> None:
    config = load(**given)
    assert [text.split(" has no effect")[0] for text in warned] == [path]
    warn_once.cache_clear()
    warned.clear()
    config.for_role("decode")
    assert not warned, "what an engine is given warns of nothing again"


def test_what_has_an_effect_does_not_warn(warned: list[str]) -> None:
    load(cache={"hot_rows": 512, "enabled": True}, pd={"lease_s": 5}, trace={"directory": "/tmp", "steps": 5})
    load_config(load().model_dump(), environ={})  # every option, at its default
    assert not warned


# ---- the page


def test_the_page_is_what_the_options_say() -> None:
    assert (ROOT / "docs/configuration.md").read_text() == page(), "hisparse config reference --out docs/configuration.md"


def test_every_option_is_described() -> None:
    for path, option in options().items():
        assert option.description and option.kind and option.scope in ("request", "rank", "replica", "node", "service"), path
        assert f"| `{option.name}`<br>`{option.variable}` | {option.kind}" in page()
    assert {path.partition(".")[0] for path in options()} == set(HiSparseConfig.model_fields)
    assert options()["cache.device_blocks"].limits == ">= 2" and options()["cache.device_blocks"].scope == "rank"
    assert options()["scheduler.prefill_chunk_tokens"].unit == "tokens" and options()["pd.lease_s"].unit == "seconds"
    assert options()["model.device"].kind == "cpu or cuda" and options()["model.path"].default == "required"
    assert options()["cache.hot_rows"].kind == "integer or list of integer or null"
    assert options()["serve.api_keys"].kind == "list of text" and set(sections()) >= {"model", "cache", "pd", "serve"}


def test_rules_and_spellings_name_options() -> None:
    for paths, _, _ in RULES:
        assert set(paths) <= set(options())
    assert {found.option for found in SPELLINGS.values()} - {None} <= set(options())


def test_the_verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(monkeypatch, "config", "reference") == 0
    assert capsys.readouterr().out == page()
    assert run(monkeypatch, "config", "reference", "--out", str(tmp_path / "c.md")) == 0
    assert (tmp_path / "c.md").read_text() == page()
    assert run(monkeypatch, "config", "reference", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert [option["path"] for option in data["options"]] == list(options()) and data["spellings"]["top_k"] is None
    assert run(monkeypatch, "config", "reference", "--out", "/no/where/c.md") == 2


def test_an_example_of_the_page_is_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(page().partition("```yaml\n")[2].partition("```")[0].replace("/models/glm-5.2", "recall"))
    config = load_config(tmp_path / "c.yaml", environ={})
    assert config.cache.host_pool_gib == 64 and config.for_role("prefill").cache.device_blocks == 4096
    assert hot_rows(config.cache, kv_layout(config))
