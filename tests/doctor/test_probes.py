"""Probes of packages, GPUs, compiler, transport and cluster, with faked surroundings."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hisparse.actors.handles import Node
from hisparse.config import load_config
from hisparse.doctor.cluster import judge
from hisparse.doctor.findings import Finding, Needs, Status, examine
from hisparse.doctor.gpu import Device, Machine, Rates, link_gb_per_s, probe_compiler, probe_devices, probe_rates
from hisparse.doctor.node import needs_of, probes
from hisparse.doctor.packages import probe_packages, probe_python, requirements
from hisparse.doctor.transport import probe_nixl
from hisparse.errors import ConfigError

CPU = Machine(devices=(), driver_cuda=None, torch_cuda=None)
H200 = Device(index=0, name="NVIDIA H200", capability=(9, 0), memory_bytes=150 << 30, pci="0000:1b:00.0")
GPU = Machine(devices=(H200,), driver_cuda=(13, 0), torch_cuda=(13, 0))


def statuses(findings: Iterable[Finding]) -> dict[str, Status]:
    found = {finding.check: finding for finding in findings}
    assert all(finding.fix for finding in found.values() if finding.status in (Status.WARN, Status.FAIL)), found
    return {name: finding.status for name, finding in found.items()}


# ------------------------------------------------------------------------------------------- all of them


def test_a_broken_probe_is_a_failure_and_ends_no_other() -> None:
    def broken(needs: Needs) -> Iterable[Finding]:
        raise KeyError("sysfs")

    def fine(needs: Needs) -> Iterable[Finding]:
        yield Finding(check="fine", status=Status.OK, text="")

    found = list(examine([("first", broken), ("second", fine)], Needs()))
    assert [(finding.check, finding.status) for finding in found] == [("first", Status.FAIL), ("fine", Status.OK)]
    assert "KeyError: 'sysfs'" in found[0].text
    assert len({name for name, _ in probes()}) == len(probes())


def test_findings_survive_json() -> None:
    finding = Finding(check="a", status=Status.WARN, text="b", fix="c")
    assert finding.asdict() == {"check": "a", "status": "warn", "text": "b", "fix": "c"}
    assert Finding.parse(finding.asdict()) == finding


def test_needs_of_a_configuration_by_hand() -> None:
    """The bundled checkpoint: 6 layers of 96 float32 values, 64 tokens a page; blocks of 64 x 3 x 256 bytes."""
    pool = (256 << 20) // (6 * 96 * 4 * 64) * (6 * 96 * 4 * 64)
    config = load_config({"model": {"path": "recall"}, "cache": {"device_blocks": 500}, "serve": {"port": 81},
                          "prefill": {"cache": {"device_blocks": 1000}}}, {"serve": {"decode_replicas": 2}}, {})
    needs = needs_of(config)
    assert needs.shared_bytes == 3 * pool and needs.memory_bytes == 3 * pool + (2 * 500 + 1000) * 64 * 3 * 256
    assert (needs.pinned_bytes, needs.num_gpus, needs.cuda, needs.port) == (0, 0, False, 81) and needs.num_cpus > 0
    private = load_config({"model": {"path": "recall"}, "cache": {"host_pool": "private"},
                           "serve": {"prefill_replicas": 0}}, environ={})
    assert needs_of(private).shared_bytes == 0 and needs_of(private).memory_bytes == pool + 2048 * 64 * 3 * 256
    cuda = load_config({"model": {"path": "recall", "device": "cuda"}, "tensor_parallel_size": 2,
                        "serve": {"prefill_replicas": 0}}, environ={})
    needs = needs_of(cuda)
    assert (needs.pinned_bytes, needs.memory_bytes, needs.num_gpus, needs.cuda) == (2 * pool, pool, 2, True)


# ------------------------------------------------------------------------------------------- packages


def packages(have: dict[str, str], *, gpu: bool, cuda: bool = False) -> dict[str, Status]:
    wanted: dict[str, tuple[Requirement, str | None]] = {
        "torch": (Requirement("torch>=2.6"), None), "nixl": (Requirement("nixl>=1.5.1,!=1.5.2"), None),
        "cupy-cuda13x": (Requirement("cupy-cuda13x>=14.2"), "cuda")}
    found = probe_packages(Needs(cuda=cuda), version=have.get, has_gpu=lambda: gpu, wanted=wanted)
    return {name: status for name, status in statuses(found).items() if name in wanted}


def test_packages() -> None:
    good = {"torch": "2.11.0+cu130", "nixl": "1.5.1", "cupy-cuda13x": "14.2.0"}
    assert set(packages(good, gpu=True).values()) == {Status.OK}
    assert packages(good | {"torch": "2.5.1"}, gpu=False)["torch"] is Status.FAIL
    assert packages(good | {"nixl": "1.5.2"}, gpu=False)["nixl"] is Status.FAIL
    assert packages({"nixl": "1.5.1"}, gpu=False)["torch"] is Status.FAIL
    bare = {"torch": "2.13", "nixl": "1.5.3"}
    assert packages(bare, gpu=False) == {"torch": Status.OK, "nixl": Status.OK, "cupy-cuda13x": Status.SKIP}
    assert packages(bare, gpu=True)["cupy-cuda13x"] is packages(bare, gpu=False, cuda=True)["cupy-cuda13x"] is Status.FAIL
    old = {"cupy-cuda13x": "13.0"}
    assert packages(good | old, gpu=False)["cupy-cuda13x"] is Status.WARN
    assert packages(good | old, gpu=True)["cupy-cuda13x"] is Status.FAIL
    assert packages(bare | {"cupy-cuda12x": "14.3"}, gpu=True)["cupy-cuda13x"] is Status.OK


def test_requirements_come_from_our_own_metadata() -> None:
    found = requirements()
    assert found["nixl"][1] is None and not found["nixl"][0].specifier.contains("1.5.2")
    assert found["cupy-cuda13x"][1] == "cuda" and "pytest" not in found


def test_python() -> None:
    assert statuses(probe_python(Needs(), version=(3, 10, 4))) == {"python": Status.FAIL}
    assert statuses(probe_python(Needs())) == {"python": Status.OK}


# ------------------------------------------------------------------------------------------- GPU


def test_no_gpu_is_a_warning_unless_it_is_configured() -> None:
    assert statuses(probe_devices(Needs(), machine=CPU)) == {"GPU": Status.WARN}
    assert statuses(probe_devices(Needs(cuda=True), machine=CPU)) == {"GPU": Status.FAIL}
    assert statuses(probe_rates(Needs(cuda=True), machine=CPU)) == {"copy rate": Status.SKIP}


def test_devices_and_driver(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n")
    gpu, driver = probe_devices(Needs(), machine=GPU, root=tmp_path)
    assert gpu.text == "NVIDIA H200, sm_90, 150.0 GiB, NUMA node 1" and gpu.status is driver.status is Status.OK
    assert driver.text == "580.95.05, CUDA 13.0, torch is built for 13.0"
    old = Machine(devices=(H200,), driver_cuda=(12, 8), torch_cuda=(13, 0))
    assert statuses(probe_devices(Needs(), machine=old, root=tmp_path))["driver"] is Status.FAIL
    ampere = Device(index=0, name="NVIDIA A100", capability=(8, 0), memory_bytes=80 << 30, pci=None)
    found = Machine(devices=(ampere,), driver_cuda=(13, 0), torch_cuda=(13, 0))
    assert statuses(probe_devices(Needs(), machine=found))["GPU 0"] is Status.WARN
    assert statuses(probe_devices(Needs(cuda=True), machine=found))["GPU 0"] is Status.FAIL


def test_compiler() -> None:
    asked: list[str] = []

    def works(architecture: str) -> bytes:
        asked.append(architecture)
        return b"cubin"

    def missing(architecture: str) -> bytes:
        raise ConfigError("compiling kernels needs CuPy")

    blackwell = Machine(devices=(Device(index=0, name="B200", capability=(10, 0), memory_bytes=1, pci=None),),
                        driver_cuda=(13, 0), torch_cuda=(13, 0))
    for machine in (CPU, GPU, blackwell):
        assert statuses(probe_compiler(Needs(), machine=machine, compile_kernel=works)) == {"NVRTC": Status.OK}
    assert asked == ["sm_90a", "sm_90a", "sm_100a"]
    cases = ((Needs(), CPU, Status.SKIP), (Needs(cuda=True), CPU, Status.FAIL), (Needs(), GPU, Status.FAIL))
    for needs, machine, status in cases:
        assert statuses(probe_compiler(needs, machine=machine, compile_kernel=missing)) == {"NVRTC": status}


@pytest.mark.parametrize(("rates", "link", "status"), [
    (Rates(to_device=53.0, to_host=52.0, gather=50.0), True, Status.OK),
    (Rates(to_device=53.0, to_host=52.0, gather=30.0), True, Status.WARN),  # below 0.6 of 63 GB/s
    (Rates(to_device=12.0, to_host=12.0, gather=12.0), False, Status.OK),  # nothing to hold it against
])
def test_rates_are_held_against_the_link(tmp_path: Path, rates: Rates, link: bool, status: Status) -> None:
    if link:
        folder = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
        folder.mkdir(parents=True)
        (folder / "max_link_width").write_text("16\n")
        (folder / "max_link_speed").write_text("32.0 GT/s PCIe\n")
    assert link_gb_per_s(H200, tmp_path) == (pytest.approx(63.0, abs=0.1) if link else None)
    found = list(probe_rates(Needs(), machine=GPU, root=tmp_path, measure=lambda index: rates))
    assert statuses(found) == {"copy rate 0": status} and f"gathered {rates.gather:.1f}" in found[0].text


# ------------------------------------------------------------------------------------------- transport, cluster


@pytest.mark.parametrize(("code", "status", "text"), [
    ("print('noise'); print('agent up')", Status.OK, "agent up"),
    ("import sys; print('first', file=sys.stderr); sys.exit('TransferError: no UCX')", Status.FAIL, "TransferError: no UCX"),
    ("import os; os.abort()", Status.FAIL, "exit code -6"),
    ("import time; time.sleep(60)", Status.FAIL, "not up within 0.5 s"),
])
def test_an_agent_that_crashes_or_hangs_is_a_failure(code: str, status: Status, text: str) -> None:
    timeout_s = 0.5 if "sleep" in code else 30.0
    (finding,) = probe_nixl(Needs(), command=(sys.executable, "-c", code), timeout_s=timeout_s)
    assert finding.status is status and finding.text == text and bool(finding.fix) is (status is Status.FAIL)


def test_a_link_slower_than_what_was_measured_is_not_believed(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    (folder / "max_link_width").write_text("1\n")
    (folder / "max_link_speed").write_text("2.5 GT/s PCIe\n")
    rates = Rates(to_device=53.0, to_host=52.0, gather=0.1)
    (finding,) = probe_rates(Needs(), machine=GPU, root=tmp_path, measure=lambda index: rates)
    assert finding.status is Status.OK and "link" not in finding.text


def node(**resources: float) -> Node:
    return Node(node_id="1", address="10.0.0.1", name="a", resources=resources)


@pytest.mark.parametrize(("needs", "status", "words"), [
    (Needs(num_cpus=10, num_gpus=2), Status.OK, "nodes 2, CPU 12, GPU 2, object store 2.0 GiB"),
    (Needs(num_cpus=13), Status.FAIL, "reserves 13 CPU"),
    (Needs(num_gpus=3), Status.FAIL, "reserves 3 GPU"),
    (Needs(num_cpus=13, num_gpus=3), Status.FAIL, "reserves 13 CPU and 3 GPU"),
])
def test_the_cluster_must_have_what_is_reserved(needs: Needs, status: Status, words: str) -> None:
    (finding,) = judge([node(CPU=8, GPU=2, object_store_memory=2 << 30), node(CPU=4)], needs)
    assert finding.status is status and words in finding.text


