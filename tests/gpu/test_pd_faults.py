"""The faults of `tests/integration/test_nixl_faults.py` in READs of GPU memory, between two GPUs where there are two.

By a kernel over mapped memory and over UCX's own choice (CUDA IPC), where READs go on without the peer's process once it is
connected, and over TCP with copies through CPU memory, where they need it at every stage, as over a network.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu import pd_world
from tests.integration.nixl_decode import Decode
from tests.integration.nixl_faults import Fleet, decode_engines
from tests.integration.test_nixl_faults import (  # noqa: F401
    test_a_hung_peer_is_silenced_and_reads_of_others_are_whole,
    test_decode_restarts,
    test_lease_that_expires_and_pages_that_are_reused,
    test_prefill_restarts_and_its_old_metadata_is_refused,
    test_prefill_restarts_in_the_middle_of_a_read,
    test_sigkill_of_prefill,
    test_sigstop_of_prefill,
)

pytestmark = pytest.mark.gpu
LINKS = {"mapped": ("", "mapped"), "ipc": ("", "ucx"), "tcp": ("tcp,cuda_copy", "ucx")}
"""UCX_TLS and `pd.gpu_reads` by name."""


@pytest.fixture(scope="module")
def device() -> str:
    return pd_world.NEAR


@pytest.fixture(scope="module", params=list(LINKS))
def link(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def fleet(link: str) -> Iterator[Fleet]:
    fleet = Fleet(LINKS[link][0], device=pd_world.FAR, one_sided=link != "tcp")
    yield fleet
    fleet.end()


@pytest.fixture(scope="module")
def decodes(link: str, device: str) -> Iterator[dict[str, Decode]]:
    tls, gpu_reads = LINKS[link]
    yield from decode_engines(tls, device=device, gpu_reads=gpu_reads)
