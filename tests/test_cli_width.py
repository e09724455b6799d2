"""What commands print fits the terminal and loses nothing on a narrow one; bars only on a terminal; Ctrl-C ends quietly."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hisparse.doctor import node
from hisparse.doctor.findings import Finding, Status
from tests.test_cli import LOCAL, run, service

ROOT = Path(__file__).parents[1]
__all__ = ["service"]
GLM = ("plan", "--model", "glm-5.2", "--gpu", "h200", "--tp", "8")
COMMANDS: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "plan": (GLM, ["12.0 x", "607", "589,824", "HiSparse"]),
    "large plan": (("plan", "--model", "deepseek-v3.2", "--gpu", "b300", "--tp", "8", "--dp", "64", "--row-dtype", "fp8",
                    "--context", "8k"), ["8k", "host"]),
    "replay": (("trace", "replay", "--kind", "volatile", "--steps", "2", "--hot-rows", "4096"),
               ["volatile", "Belady", "4,096"]),
    "dry run": (("serve", str(LOCAL), "--dry-run"), ["max_num_seqs", "3,328 rows", "49,152"]),
    "bench list": (("bench", "list"), ["control-plane", "a service", "OpenAI-compatible"]),
    "doctor": (("doctor",), ["shared memory", "mount -o remount,size=", "1 failed"]),
}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [Finding(check="shared memory", status=Status.FAIL, text="64 MiB free of 64 MiB, the pools take 9 GiB",
                        fix="enlarge it (docker --shm-size, a Memory volume's sizeLimit, mount -o remount,size=)")]
    monkeypatch.setattr(node, "examine_node", lambda needs: iter(findings))


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_it_fits_and_loses_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str,
                                   columns: int) -> None:
    arguments, words = COMMANDS[name]
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(monkeypatch, *arguments) in (0, 1)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text and "\x1b" not in text
    flat = " ".join(text.replace("│", " ").split())
    assert all(word in flat for word in words), [word for word in words if word not in flat]


@pytest.mark.parametrize("columns", [60, 80])
def test_status_fits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int,
                     service: tuple[str, dict[str, Any]]) -> None:
    url, state = service
    engines = [{"engine": f"{role}-1a2b3c4d", "health": {"ok": False, "reason": "no step for 61 s"}, "running": 256,
                "waiting": 1024, "loading": 12, "held": 99, "hot_region_rows": [2112, 8256],
                "cache": {"host_to_device_bytes": 123_456_789_012_345}} for role in ("prefill", "decode")]
    state["answer"] = {"model": "glm-5.2", "engines": engines}
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(monkeypatch, "status", "--url", url) == 1
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns and "…" not in text
    assert all(word in text for word in ("256", "1024", "123,456,789,012,345", "prefill-1a2b3c4d"))


def test_a_key_that_is_missing_or_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                        service: tuple[str, dict[str, Any]]) -> None:
    url, state = service
    state["answer"], state["code"] = {"error": {"message": "no valid API key"}}, 401
    assert run(monkeypatch, "status", "--url", url) == 1
    error = capsys.readouterr().err
    assert "answered 401: no valid API key; give the service's key with --api-key or OPENAI_API_KEY" in error


# ---- a terminal


def on_terminal(*arguments: str, **variables: str) -> tuple[int, str]:
    """Exit code and what stderr, a terminal, was sent."""
    near, far = pty.openpty()
    with subprocess.Popen([sys.executable, "-m", "hisparse.cli", *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=far,
                          env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "80"} | variables) as process:
        os.close(far)
        shown = b""
        with contextlib.suppress(OSError):  # the other side is closed
            while part := os.read(near, 4096):
                shown += part
        process.wait(60)
    os.close(near)
    return process.returncode, shown.decode(errors="replace")


def test_a_bar_on_a_terminal_only() -> None:
    replay = ("trace", "replay", "--kind", "scan", "--steps", "2", "--hot-rows", "2048", "--policy", "lru")
    for arguments in (replay, ("bench", "control-plane", "--quick", "--shape", "glm-5.2", "--only", "page_keys")):
        code, shown = on_terminal(*arguments)
        assert code == 0 and "━" in shown and "\x1b[" in shown, shown
        code, shown = on_terminal(*arguments, "--json")
        assert code == 0 and "━" not in shown, shown
    done = subprocess.run([sys.executable, "-m", "hisparse.cli", *replay], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_no_color_on_a_terminal() -> None:
    code, shown = on_terminal("serve", "/no/such.yaml", NO_COLOR="1")
    assert code == 2 and "\x1b[31m" not in shown and "cannot read" in shown
    code, shown = on_terminal("serve", "/no/such.yaml")
    assert code == 2 and "\x1b[31m" in shown


@pytest.mark.parametrize("arguments", [
    ("trace", "replay", "--steps", "100000"),
    ("bench", "policy"),
    ("bench", "import", "--only", "tiny", "--only", "nixl", "--repeats", "100000"),  # with a process of its own
], ids=lambda arguments: " ".join(arguments[:2]))
def test_ctrl_c_is_quiet(arguments: tuple[str, ...]) -> None:
    """As a terminal sends it: to every process of the command."""
    children: set[int] = set()
    # Whoever runs these tests in the background of a shell has told them to ignore SIGINT, and Python keeps to that.
    start = ("import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from hisparse.cli import main; "
             "print('up', flush=True); main()")
    with subprocess.Popen([sys.executable, "-c", start, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "up\n"
            for _ in range(100):  # a signal before Python is ready for it would be lost or shown
                time.sleep(0.2)
                if _is_busy(process.pid) and ("import" not in arguments or len(_group(process.pid)) > 2):
                    break
            children |= set(_group(process.pid))
            os.killpg(process.pid, signal.SIGINT)
            _, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, (process.returncode, error)
    assert "Traceback" not in error and "Error" not in error
    for _ in range(100):  # killed children are gone when the kernel has cleaned up
        if not _group(process.pid):
            break
        time.sleep(0.2)
    assert _group(process.pid) == []
    left = [path.name for pid in children for path in Path("/dev/shm").glob(f"hisparse-*.{pid}.*")]
    assert not left, "host pools stay behind"


def _group(leader: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == leader and fields[0] not in "ZX":
                found.append(int(path.parent.name))
    return found


def _is_busy(pid: int) -> bool:
    """Whether the process has used 1.5 s of processor time since it began: it is past its start."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") > 1.5
