"""Instances compiled on threads before they are asked for; NVRTC compiles without a GPU."""

from __future__ import annotations

import subprocess
import sys
import threading

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
    files = [module._ahead[instance.key()].result(60) for instance in instances[:2]]
    assert len(compiled) == 2 and len(set(files)) == 2 and all(file.read_bytes()[:4] == b"\x7fELF" for file in files)
    assert [module._cubin_file(instance) for instance in instances[:2]] == files and len(compiled) == 2  # from the cache


def test_what_does_not_compile_is_told_when_it_is_needed(instances):
    module.compile_ahead(instances[2:])
    with pytest.raises(ConfigError, match=r"(?s)does not compile for sm_90a.*VALUE"):
        module._ahead[instances[2].key()].result(60)


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
