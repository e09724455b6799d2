"""NIXL: whether an agent with its UCX backend comes up, in a process of its own, which may crash or hang alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence

from hisparse.doctor.findings import Finding, Needs, Status

TIMEOUT_S = 60.0
CODE = """
import os, time
begin = time.monotonic()
import numpy
from hisparse.pd.nixl import NixlTransport
transport = NixlTransport(f"hisparse-doctor-{os.getpid()}")
memory = numpy.zeros(1 << 20, numpy.uint8)
transport.register(memory.ctypes.data, memory.nbytes)
size = len(transport.metadata())
transport.close()
print(f"agent with UCX up in {time.monotonic() - begin:.1f} s, 1 MiB registered, {size} bytes of metadata")
"""


def probe_nixl(needs: Needs, *, command: Sequence[str] = (sys.executable, "-c", CODE),
               timeout_s: float = TIMEOUT_S) -> Iterator[Finding]:
    """Prefill and decode replicas cannot talk without it."""
    fix = "pip install --force-reinstall 'nixl>=1.5.1,!=1.5.2'; UCX_LOG_LEVEL=info shows which transport UCX tried"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        yield Finding(check="NIXL agent", status=Status.FAIL, text=f"not up within {timeout_s:g} s", fix=fix)
        return
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield Finding(check="NIXL agent", status=Status.FAIL, text=why, fix=fix)
    else:
        yield Finding(check="NIXL agent", status=Status.OK, text=lines[-1])
