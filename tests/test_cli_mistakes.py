"""What a new user gets wrong: each mistake ends with what to do. Nothing is started."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hisparse.actors import handles
from hisparse.actors.handles import Node
from hisparse.cli import serve as cli_serve
from hisparse.config import load_config
from hisparse.config.loading import warn_once
from hisparse.doctor.findings import Finding, Needs, Status
from hisparse.doctor.host import Host
from hisparse.doctor.preflight import problems, text_of
from hisparse.errors import HiSparseError
from hisparse.serve import instance
from tests.test_cli import LOCAL, run

GIB = 1 << 30


@pytest.mark.parametrize(("args", "text"), [
    (["--model", "deepseek-ai/DeepSeek-V3.2"], "hf download deepseek-ai/DeepSeek-V3.2 --local-dir DIRECTORY"),
    (["--model", "/no/such/place"], "no checkpoint at /no/such/place (config.json not found); give a local directory"),
    (["--model", "recall", "--set", "cache.hot_row=9"], "cache.hot_row: unknown key; did you mean hot_rows?"),
    (["--model", "recall", "--set", "cache.hot_rows=[9"], "--set cache.hot_rows=[9: the value is not valid YAML"),
    (["--model", "recall", "--set", "cache=3", "--set", "cache.hot_rows=x"], "cache.hot_rows: must be a number of rows"),
    (["--model", "recall", "--set", ".x=3"], "--set takes section.key=value"),
    (["--model", "recall", "--set", "serve.port=99999"], "less than or equal to 65535"),
    (["--model", "recall", "--set", "serve.host=0.0.0.0"], "no API keys are set"),
    (["--model", "recall", "--set", "cache.host_pool_gib=0.0001"], "raise host_pool_gib to 0.0"),
    (["--model", "recall", "--set", "cache.device_blocks=9"], "device_blocks"),
    (["--model", "recall", "--set", "tensor_parallel_size=3"], "the model's 8 attention heads; use one of [1, 2, 4, 8]"),
    (["--model", "recall", "--set", "model.max_model_len=999999"], "max_position_embeddings"),
])
def test_wrong_values(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], text: str) -> None:
    assert run(monkeypatch, "serve", *args, "--dry-run") == 2
    shown = capsys.readouterr()
    assert text in shown.err and not shown.out and "Traceback" not in shown.err


APP = "- name: {name}\n  import_path: {path}\n  args:\n    model: {{path: recall}}\n"
OURS = "hisparse.serve:build_app"


@pytest.mark.parametrize(("apps", "text"), [
    ([("a", OURS), ("a", "x:y")], "line 6: two applications are named 'a', the first in line 2"),
    ([("a", OURS), ("b", OURS)], "this file has 2 with import_path hisparse.serve:build_app. 'serve run'"),
    ([("a", "x:y")], "this file has 0 with import_path"),
])
def test_serve_files_with_other_applications(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                             tmp_path: Path, apps: list[tuple[str, str]], text: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("applications:\n" + "".join(APP.format(name=name, path=module) for name, module in apps))
    assert run(monkeypatch, "serve", str(path), "--dry-run") == 2
    assert text in capsys.readouterr().err


def test_one_application_of_ours_among_others_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                                       tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("applications:\n" + APP.format(name="a", path="x:y") + APP.format(name="b", path=OURS))
    assert run(monkeypatch, "serve", str(path), "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["config"]["model"]["path"] == "recall"


def test_an_option_without_effect_is_a_warning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    warn_once.cache_clear()
    assert run(monkeypatch, "serve", "--model", "recall", "--dry-run", "--json", "--set", "pd.role=decode", "--set",
               "top_k=2048") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["config"]["pd"]["role"] == "decode"
    assert [line.split(" has no effect")[0] for line in shown.err.splitlines()] == ["warning: top_k = 2048", "warning: pd.role"]


# ---- this machine


@pytest.fixture
def machine(tmp_path: Path) -> Host:
    """1 GiB of memory, no limit below it for /dev/shm, 1 MiB may be locked."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 2097152 kB\nMemAvailable: 1048576 kB\n")
    (tmp_path / "shm").mkdir()
    return Host(root=tmp_path, shm=tmp_path / "shm", memlock_bytes=1 << 20)


@pytest.mark.parametrize(("needs", "check", "fix"), [
    (Needs(memory_bytes=GIB + 1), "host memory: 1.0 GiB can be allocated now, the pools take 1.0 GiB", "cache.host_pool_gib"),
    (Needs(shared_bytes=1 << 60), "shared memory", "enlarge /dev/shm"),
    (Needs(pinned_bytes=GIB, cuda=True), "locked memory: limit of 1 MiB, pinning", "ulimit -l unlimited"),
])
def test_pools_that_do_not_fit(machine: Host, needs: Needs, check: str, fix: str) -> None:
    (found,) = problems(dataclasses.replace(needs, port=0), host=machine)
    text = text_of([found])
    assert text.startswith(f"  {check}") and "\n    fix: " in text and fix in text


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def test_a_port_in_use(machine: Host, taken: int) -> None:
    needs = Needs(port=taken)
    (found,) = problems(needs, host=machine)
    assert f"127.0.0.1:{taken}: Address already in use" in found.text and "choose another serve.port" in found.fix
    assert problems(needs, host=machine, with_port=False) == []


def test_our_own_service_on_the_port(machine: Host) -> None:
    import http.server

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"engines": []}')

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        (found,) = problems(Needs(port=server.server_port), host=machine)
        assert "a running hisparse answers" in found.text and "choose another" in found.fix
    finally:
        server.shutdown()
        server.server_close()


def test_the_dry_run_says_what_does_not_fit_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("serve", str(LOCAL), "--dry-run", "--set", "cache.host_pool_gib=100000")
    assert run(monkeypatch, *command) == 0
    shown = capsys.readouterr()
    assert "memory plan" in shown.out
    assert "do not fit on this machine" in shown.err and "fix: enlarge /dev/shm" in shown.err
    assert run(monkeypatch, *command, "--json") == 0
    found = json.loads(capsys.readouterr().out)["problems_here"]
    assert {item["check"] for item in found} == {"host memory", "shared memory"} and all(item["fix"] for item in found)
    assert run(monkeypatch, "serve", str(LOCAL), "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["problems_here"] == []


# ---- the cluster


def play_ray(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> list[str]:
    """Ray that joins (None) or fails to; returns the addresses that it was asked for."""
    asked: list[str] = []

    def init(address: str, **options: Any) -> None:
        asked.append(address)
        if address == "auto" and error is not None:
            raise error

    monkeypatch.setattr(handles, "ray", SimpleNamespace(is_initialized=lambda: False, init=init, shutdown=lambda: None))
    return asked


MISMATCH = RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.10.1\n"
                        "This process on node 10.0.0.1 was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n")


def test_a_cluster_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    asked = play_ray(monkeypatch, MISMATCH)
    for start in (handles.start_cluster, handles.join_cluster):
        with pytest.raises(HiSparseError, match=r"Ray: 2.9.0 Python: 3.10.1 .*Ray: 2.60.0.*'ray stop'.*RAY_ADDRESS=local"):
            start()
    assert asked == ["auto", "auto"], "no other cluster is started beside it unasked"
    play_ray(monkeypatch, RuntimeError("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        handles.start_cluster()


def test_where_a_cluster_comes_from(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert play_ray(monkeypatch, None) == [] and handles.start_cluster() is False
    asked = play_ray(monkeypatch, ConnectionError("none"))
    assert handles.start_cluster() is True and asked == ["auto", "local"]
    monkeypatch.setenv("RAY_ADDRESS", "local")
    asked = play_ray(monkeypatch, None)
    assert handles.start_cluster() is True and asked == ["local"]
    for address, called in (("127.0.0.1:1", []), (f"127.0.0.1:{taken}", ["auto"])):
        monkeypatch.setenv("RAY_ADDRESS", address)
        asked = play_ray(monkeypatch, ConnectionError("none"))
        with pytest.raises(HiSparseError, match=f"RAY_ADDRESS is {address}, and no Ray cluster answers there"):
            handles.start_cluster()
        assert asked == called


def node(**resources: float) -> Node:
    return Node(node_id="1", address="10.0.0.1", name="n", resources=resources)


@pytest.mark.parametrize(("nodes", "options", "text"), [
    ([node(CPU=8)], {"model": {"path": "recall", "device": "cuda", "dtype": "bfloat16"}}, "reserves 2 GPU"),
    ([node(CPU=8)], {"cache": {"host_pool_gib": 100_000}}, "shared memory"),
    ([node(CPU=0.1)], {}, "CPU"),
])
def test_a_service_that_cannot_start(monkeypatch: pytest.MonkeyPatch, nodes: list[Node], options: dict[str, Any],
                                     text: str) -> None:
    monkeypatch.setattr(handles, "cluster_nodes", lambda: nodes)
    config = load_config({"model": {"path": "recall"}, "serve": {"port": 0}} | options, environ={})
    with pytest.raises(HiSparseError, match=f"(?s)the service cannot start here:.*{text}.*fix: "):
        cli_serve._check_room(config, started=True)


def test_resources_in_use_are_waited_for_and_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(handles, "cluster_nodes", lambda: [node(CPU=8), node(CPU=8)])
    monkeypatch.setattr(handles, "free_resources", lambda: {"CPU": 0.2})
    monkeypatch.setattr(instance, "check_no_other_serve", lambda: None)
    config = load_config({"model": {"path": "recall"}, "cache": {"host_pool_gib": 100_000}}, environ={})
    cli_serve._check_room(config, started=False)  # two nodes: their memory is not this machine's
    assert "of which 0.2 are free now: it waits" in capsys.readouterr().err


def test_findings_without_a_fix_do_not_exist(machine: Host) -> None:
    for found in problems(Needs(memory_bytes=1 << 60, shared_bytes=1 << 60, pinned_bytes=1 << 60, port=0), host=machine):
        assert isinstance(found, Finding) and found.status is Status.FAIL and found.fix
