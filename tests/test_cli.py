"""The command line without a cluster: configuration, dry run, status, exit codes."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hisparse import cli
from hisparse.errors import ConfigError

LOCAL = Path(__file__).parents[1] / "deploy" / "ray" / "local.yaml"


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr("sys.argv", ["hisparse", *args])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def test_dry_run_prints_configuration_and_plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "serve", str(LOCAL), "--dry-run", "--json", "--set", "serve.api_keys=[secret]",
               "--set", "cache.device_blocks=200") == 0
    text = capsys.readouterr().out
    data = json.loads(text)
    assert data["config"]["cache"]["device_blocks"] == 200 and "secret" not in text
    prefill, decode = data["memory"]
    assert (prefill["role"], decode["role"]) == ("prefill", "decode")
    assert decode["device_bytes"] == 200 * 64 * 3 * 256 and decode["kv_bytes_per_token"] == 6 * 96 * 4
    assert decode["hot_rows"] == [832] * 3 and decode["packing"]["block_bytes"] == 64 * 3 * 256
    assert [group["layers"] for group in decode["packing"]["groups"]] == [[0, 2, 4], [0, 1], [2, 3], [4, 5]]
    assert run(monkeypatch, "serve", "--model", "recall", "--dry-run") == 0
    text = capsys.readouterr().out
    assert "host pool" in text and "(prefill, decode)" in text and "832 rows" in text


def test_dry_run_shows_rows_and_layers_of_each_hot_group(monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    split = ("--set", "cache.hot_rows_total=3000", "--set", "cache.hot_rows_weights=[1, 5, 9]")
    assert run(monkeypatch, "serve", "--model", "recall", "--dry-run", *split) == 0
    text = capsys.readouterr().out
    # 46 pages, 4 for each group; the other 34 in shares of 2.27, 11.33, 20.4
    assert [line.split()[-2:] for line in text.splitlines()[-3:]] == [["384", "0-1"], ["960", "2-3"], ["1,600", "4-5"]]
    assert "384..1,600" in text and "1,536..6,400" in text
    assert run(monkeypatch, "serve", "--model", "recall", "--dry-run", "--set", "cache.hot_rows=[512, 512]") == 2
    error = capsys.readouterr().err
    assert "cache.hot_rows has 2 entries" in error and "3 hot groups" in error
    assert "--dry-run --set cache.hot_rows=null" in error
    assert run(monkeypatch, "serve", "--model", "recall", "--dry-run", "--set", "cache.hot_rows=[512, 512]",
               "--set", "cache.hot_rows=null") == 0
    assert run(monkeypatch, "serve", "--model", "recall", "--dry-run", "--set", "cache.num_groups=1") == 0
    assert capsys.readouterr().out.count("0-5") == 1


@pytest.mark.parametrize(("args", "text"), [
    (["serve"], "either CONFIG.yaml or --model"),
    (["serve", str(LOCAL), "--model", "recall"], "either CONFIG.yaml or --model"),
    (["serve", "--model", "/no/such/place"], "no checkpoint at"),
    (["serve", "/no/such.yaml"], "cannot read"),
    (["serve", "--model", "recall", "--set", "cache.blocks=3"], "cache.blocks: unknown key"),
    (["serve", "--model", "recall", "--set", "nonsense"], "section.key=value"),
    (["serve", "--model", "recall", "--set", "cache.host_pool_gib=0.0001", "--dry-run"], "raise host_pool_gib"),
    (["fly"], "No such command"),
])
def test_mistakes_are_usage_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str],
                                   text: str) -> None:
    assert run(monkeypatch, *args) == 2
    assert text in capsys.readouterr().err


def test_serve_files_are_recognised(tmp_path: Path) -> None:
    config = cli.read_configuration(LOCAL, None, [])
    assert config.serve.port == 8000 and config.serve.prefill_replicas == 1
    bad = tmp_path / "bad.yaml"
    bad.write_text("applications: []\n")
    with pytest.raises(ConfigError, match=r"applications\[0\].args"):
        cli.read_configuration(bad, None, [])


@pytest.fixture
def service() -> Iterator[tuple[str, dict[str, Any]]]:
    state: dict[str, Any] = {"seen": []}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state["seen"].append((self.path, self.headers.get("Authorization")))
            body = json.dumps(state["answer"]).encode()
            self.send_response(state.get("code", 200))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", state
    server.shutdown()
    server.server_close()


def test_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                service: tuple[str, dict[str, Any]]) -> None:
    url, state = service
    engine = {"engine": "decode-1", "health": {"ok": True, "reason": ""}, "running": 3, "check": "ok",
              "cache": {"pending_spills": 17}, "indexer_store": {"used_pages": 31}, "hot_region_rows": [2112, 8256]}
    state["answer"] = {"model": "recall", "engines": [engine]}
    assert run(monkeypatch, "status", "--url", url, "--check", "--api-key", "k") == 0
    text = capsys.readouterr().out
    assert "decode-1" in text and "17" in text and "2,112..8,256 rows" in text
    assert "indexer_store_used_pages" in text and "31" in text
    assert state["seen"] == [("/stats?check=1", "Bearer k")]
    engine["check"] = "block 5 is lost"
    assert run(monkeypatch, "status", "--url", url, "--json") == 1
    assert json.loads(capsys.readouterr().out) == state["answer"]
    state["code"] = 401
    assert run(monkeypatch, "status", "--url", url) == 1
    assert "answered 401" in capsys.readouterr().err
    assert run(monkeypatch, "status", "--url", "http://127.0.0.1:9") == 1
    assert "hisparse serve" in capsys.readouterr().err
