"""CUDA devices, the compiler of our kernels, and how fast host memory is copied and gathered from."""

from __future__ import annotations

import ctypes
import mmap
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hisparse.config import GIB
from hisparse.doctor.findings import Finding, Needs, Status

ROW_BYTES, TOP_K, REQUESTS = 656, 2048, 16
"""The gather that is measured: misses of 16 requests with fp8_ds_mla rows, all of top_k missing."""
COPY_BYTES, POOL_BYTES = 256 << 20, 512 << 20
GIGATRANSFERS = {"2.5": 0.25, "5.0": 0.5, "8.0": 0.985, "16.0": 1.969, "32.0": 3.938, "64.0": 7.563}
"""GB/s of one PCIe lane by the speed that sysfs shows."""
SLOW = 0.6
"""Of the link's rate: a copy below it is warned about. A good link reaches 0.8 to 0.9."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A CUDA device. `pci`: e.g. "0000:1b:00.0", or None where torch does not tell."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    pci: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What torch and the driver say. `devices`: empty without a GPU. `driver_cuda`, `torch_cuda`: (major, minor) or None."""

    devices: tuple[Device, ...]
    driver_cuda: tuple[int, int] | None
    torch_cuda: tuple[int, int] | None

    @classmethod
    def find(cls) -> Machine:
        import torch

        built = torch.version.cuda
        torch_cuda = None if built is None else (int(built.split(".")[0]), int(built.split(".")[1]))
        if not torch.cuda.is_available():
            return cls(devices=(), driver_cuda=None, torch_cuda=torch_cuda)
        code = _driver_code()
        devices = []
        for index in range(torch.cuda.device_count()):
            facts: Any = torch.cuda.get_device_properties(index)
            bus = getattr(facts, "pci_bus_id", None)
            pci = None if bus is None else f"{facts.pci_domain_id:04x}:{bus:02x}:{facts.pci_device_id:02x}.0"
            devices.append(Device(index=index, name=facts.name, capability=(facts.major, facts.minor),
                                  memory_bytes=facts.total_memory, pci=pci))
        driver_cuda = (code // 1000, code % 1000 // 10) if code else None
        return cls(devices=tuple(devices), driver_cuda=driver_cuda, torch_cuda=torch_cuda)


def probe_devices(needs: Needs, *, machine: Machine | None = None, root: Path = Path("/")) -> Iterator[Finding]:
    """Each GPU with its link and NUMA node, and whether driver and torch fit."""
    machine = machine or Machine.find()
    if not machine.devices:
        cpu_only = "this torch is a CPU build" if machine.torch_cuda is None else "torch sees none (nvidia-smi says why)"
        yield Finding(check="GPU", status=Status.FAIL if needs.cuda else Status.WARN, text=f"none: {cpu_only}",
                      fix="install a torch built for CUDA and a driver, or set model.device to cpu" if needs.cuda else
                      "none needed for the CPU backend")
        return
    for device in machine.devices:
        major, minor = device.capability
        text = f"{device.name}, sm_{major}{minor}, {device.memory_bytes / GIB:,.1f} GiB{_place(device, root)}"
        if major < 9:
            yield Finding(check=f"GPU {device.index}", status=Status.FAIL if needs.cuda else Status.WARN, text=text,
                          fix="kernels are proven on Hopper (sm_90) and compile for Blackwell; use such a GPU")
        else:
            yield Finding(check=f"GPU {device.index}", status=Status.OK, text=text)
    driver, built = machine.driver_cuda or (0, 0), machine.torch_cuda or (0, 0)
    text = f"{_driver_name(root)}CUDA {driver[0]}.{driver[1]}, torch is built for {built[0]}.{built[1]}"
    if driver[0] < built[0]:
        yield Finding(check="driver", status=Status.FAIL, text=text, fix="update the driver, or install an older torch")
    else:
        yield Finding(check="driver", status=Status.OK, text=text)


def probe_compiler(needs: Needs, *, machine: Machine | None = None,
                   compile_kernel: Callable[[str], bytes] | None = None) -> Iterator[Finding]:
    """Compiles one kernel with NVRTC, for the first GPU or, without one, for sm_90a."""
    from hisparse.errors import ConfigError

    machine = machine or Machine.find()
    major, minor = machine.devices[0].capability if machine.devices else (9, 0)
    architecture = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
    try:
        cubin = (compile_kernel or _compile)(architecture)
    except ConfigError as error:
        wanted = needs.cuda or bool(machine.devices)
        yield Finding(check="NVRTC", status=Status.FAIL if wanted else Status.SKIP, text=str(error).splitlines()[0],
                      fix="pip install 'hisparse[cuda]'" if wanted else "")
        return
    yield Finding(check="NVRTC", status=Status.OK, text=f"replay.cu compiles for {architecture}: {len(cubin):,} bytes")


def probe_rates(needs: Needs, *, machine: Machine | None = None, root: Path = Path("/"),
                measure: Callable[[int], Rates] | None = None) -> Iterator[Finding]:
    """Measures every GPU: copies of 256 MiB, and rows read by a kernel from 512 MiB of registered memory."""
    machine = machine or Machine.find()
    if not machine.devices:
        yield Finding(check="copy rate", status=Status.SKIP, text="no GPU to measure")
    for device in machine.devices:
        rates = (measure or Rates.measure)(device.index)
        link = link_gb_per_s(device, root)
        if link is not None and max(rates.to_device, rates.to_host) > link:
            link = None  # a virtual machine shows a link that is not there
        text = (f"to the device {rates.to_device:.1f}, to the host {rates.to_host:.1f}, rows gathered {rates.gather:.1f} GB/s"
                + (f" (link {link:.0f})" if link else ""))
        slowest = min(rates.to_device, rates.to_host, rates.gather)
        if link is not None and slowest < SLOW * link:
            yield Finding(check=f"copy rate {device.index}", status=Status.WARN, text=text,
                          fix="stop what else uses the link, look at the BIOS (ACS, IOMMU), pin to the GPU's NUMA node")
        else:
            yield Finding(check=f"copy rate {device.index}", status=Status.OK, text=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """GB/s (1e9). `gather`: rows of 656 bytes, anywhere in registered host memory, by the kernel that copies misses."""

    to_device: float
    to_host: float
    gather: float

    @classmethod
    def measure(cls, index: int) -> Rates:
        """About two seconds, the first time with the kernel's compilation. Takes 0.8 GiB of host, 0.3 of device memory."""
        import torch

        with torch.cuda.device(index):
            host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
            device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
            to_device = COPY_BYTES / _seconds(lambda: device.copy_(host, non_blocking=True))
            to_host = COPY_BYTES / _seconds(lambda: host.copy_(device, non_blocking=True))
            return cls(to_device=to_device / 1e9, to_host=to_host / 1e9, gather=_gather_rate(index) / 1e9)


def _gather_rate(index: int) -> float:
    """Bytes per second; raises RuntimeError when a gathered row is not the row that was asked for."""
    import numpy as np
    import torch

    from hisparse.ops import DeviceMissPlan, backend
    from hisparse.ops.cuda import mapped

    device = torch.device("cuda", index)
    memory = mmap.mmap(-1, POOL_BYTES)
    pool = np.frombuffer(memory, dtype=np.uint8)
    num_rows = POOL_BYTES // ROW_BYTES
    rows_of_pool = pool[: num_rows * ROW_BYTES].reshape(num_rows, ROW_BYTES)
    rows_of_pool[:, :4] = np.arange(num_rows, dtype=np.int32)[:, None].view(np.uint8)
    address = pool.ctypes.data
    mapped.register(address, POOL_BYTES, device)
    try:
        alias = mapped.tensor_at(mapped.device_address(address, device), POOL_BYTES, device)
        host_rows = alias[: num_rows * ROW_BYTES].view(num_rows, ROW_BYTES)
        picks = torch.randint(num_rows, (REQUESTS, TOP_K), dtype=torch.int32, device=device)
        places = torch.arange(REQUESTS * TOP_K, dtype=torch.int32, device=device).view(REQUESTS, TOP_K)
        counts = torch.full((REQUESTS,), TOP_K, dtype=torch.int32, device=device)
        plan = DeviceMissPlan(host_rows=picks, device_rows=places, counts=counts)
        rows = torch.zeros((REQUESTS * TOP_K, ROW_BYTES), dtype=torch.uint8, device=device)
        replay = backend("cuda").replay
        seconds = _seconds(lambda: replay(plan, 0, rows, host_rows))
        if not torch.equal(rows[:, :4].contiguous().view(torch.int32).flatten(), picks.flatten()):
            raise RuntimeError("a gathered row is not the row that was asked for")
    finally:
        torch.cuda.synchronize(device)
        mapped.unregister(address, device)
    return REQUESTS * TOP_K * ROW_BYTES / seconds


def _seconds(run: Callable[[], object]) -> float:
    """Median of seven, on the device's clock, after a first call."""
    import torch

    run()
    times: list[float] = []
    event: Any = torch.cuda.Event
    for _ in range(7):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def link_gb_per_s(device: Device, root: Path = Path("/")) -> float | None:
    """Rate of the PCIe link, one way; None where sysfs does not tell. Example: 16 lanes at 32 GT/s: 63."""
    try:
        folder = root / "sys/bus/pci/devices" / str(device.pci)
        lanes = int((folder / "max_link_width").read_text())
        speed = (folder / "max_link_speed").read_text().split()[0]
        rate = lanes * GIGATRANSFERS[speed]
        return rate if 1 <= lanes <= 32 else None
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _place(device: Device, root: Path) -> str:
    try:
        node = int((root / "sys/bus/pci/devices" / str(device.pci) / "numa_node").read_text())
    except (OSError, ValueError):
        node = -1
    return f", NUMA node {node}" if node >= 0 else ""


def _driver_code() -> int:
    """Newest CUDA that the driver supports. Example: 13000 for 13.0; 0 where the driver's library does not load."""
    code = ctypes.c_int()
    try:
        return code.value if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(code)) == 0 else 0
    except OSError:
        return 0


def _driver_name(root: Path) -> str:
    """Example: "580.95.05, "."""
    try:
        first = (root / "proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""
    found = re.search(r"\d{3}\.\d+(\.\d+)?", first)
    return f"{found[0]}, " if found else ""


def _compile(architecture: str) -> bytes:
    from hisparse.ops.cuda.module import compile_cubin
    from hisparse.ops.cuda.replay import INSTANCES

    return compile_cubin(INSTANCES[0], architecture)
