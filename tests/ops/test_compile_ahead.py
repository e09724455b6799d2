"""Instances compiled on threads before they are asked for; NVRTC compiles without a GPU."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from hisparse.errors import ConfigError
from hisparse.ops.cuda import module
from hisparse.ops.cuda.module import Instance

SOURCE = 'extern "C" __global__ void fill(int* out) { out[threadIdx.x] = VALUE; }\n'


@pytest.fixture
def instances(tmp_path, monkeypatch):
    """Two that compile and one that does not, in a directory and a cache of their own."""
    (tmp_path / "fill.cu").write_text(SOURCE)
    monkeypatch.setattr(module, "kernel_sources", lambda: tmp_path)
    monkeypatch.setattr(module, "_ahead", {})
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    return [Instance("fill.cu", "fill", {"VALUE": value}, "sm_90a") for value in (1, 2)] + [
        Instance("fill.cu", "fill", {}, "sm_90a")]


def test_each_is_compiled_once_at_the_same_time(instances, monkeypatch):
    together, compiled, compile_cubin = threading.Barrier(2, timeout=60), [], module.compile_cubin

    def slow(instance, architecture):
        compiled.append(instance)
        together.wait()  # breaks unless the other is being compiled, too
        return compile_cubin(instance, architecture)

    monkeypatch.setattr(module, "compile_cubin", slow)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)  # with one core they come one after the other
    for _ in range(3):
        module.compile_ahead(instances[:2])
    assert all(module._ahead[instance.key()].wait(60) for instance in instances[:2]) and len(compiled) == 2
    files = [module._cubin_file(instance) for instance in instances[:2]]
    assert len(set(files)) == 2 and all(file.read_bytes()[:4] == b"\x7fELF" for file in files)
    assert len(compiled) == 2, "compiled again, although it was there"


@pytest.fixture
def device(monkeypatch):
    """CuPy of a device that loads any file, into its module's `path`."""
    function = SimpleNamespace(kernel=SimpleNamespace(ptr=7))
    loaded: list[str] = []

    def raw_module(path: str) -> SimpleNamespace:
        loaded.append(path)
        return SimpleNamespace(get_function=lambda name: function)

    class Refused(Exception):
        pass

    cuda = SimpleNamespace(Device=lambda device: contextlib.nullcontext(), compiler=SimpleNamespace(CompileException=Refused))
    monkeypatch.setattr(module, "_cupy", lambda: SimpleNamespace(cuda=cuda, RawModule=raw_module))
    monkeypatch.setattr(module, "Kernel", lambda pointer, name, device, owner: (pointer, name, device))
    monkeypatch.setattr(module.driver, "bind_context", lambda device: None)
    return loaded


def test_load_waits_for_what_is_being_compiled(instances, device, monkeypatch):
    may_compile, compile_cubin, threads = threading.Event(), module.compile_cubin, []

    def late(instance, architecture):
        threads.append(threading.current_thread().name)
        assert may_compile.wait(60)
        return compile_cubin(instance, architecture)

    monkeypatch.setattr(module, "compile_cubin", late)
    module.compile_ahead(instances[:1])
    threading.Timer(0.2, may_compile.set).start()
    assert module._kernel.__wrapped__(instances[0].key(), 0) == (7, "fill.cu:fill", 0)
    assert device == [str(module._cubin_file(instances[0]))] and threads == ["nvrtc"]


def test_what_does_not_compile_is_told_when_it_is_needed(instances, device):
    module.compile_ahead(instances[2:])
    with pytest.raises(ConfigError, match=r"(?s)does not compile for sm_90a.*VALUE"):
        module._kernel.__wrapped__(instances[2].key(), 0)
    assert device == []


def test_a_process_that_ends_waits_for_what_is_being_compiled_alone():
    program = """
import os, threading
from hisparse.ops.cuda import module
os.cpu_count = lambda: 2
module._cubin_file = lambda instance: (threading.main_thread().join(), os.write(1, b"%d " % instance.defines["VALUE"]))
module.compile_ahead(module.Instance("fill.cu", "fill", {"VALUE": value}, "sm_90a") for value in range(6))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert sorted(done.stdout.split()) == ["0", "1"] and not done.stderr
