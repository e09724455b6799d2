"""The doctor's probes on a real GPU: they find it, compile for it, and measure rates that a host link can have."""

from __future__ import annotations

import pytest
import torch

from hisparse.doctor.findings import Needs, Status
from hisparse.doctor.gpu import Machine, Rates, probe_compiler, probe_devices, probe_rates

pytestmark = pytest.mark.gpu


def test_devices_are_found() -> None:
    machine = Machine.find()
    assert len(machine.devices) == torch.cuda.device_count() and machine.driver_cuda is not None
    assert machine.driver_cuda >= (12, 0) and machine.devices[0].name == torch.cuda.get_device_name(0)
    findings = list(probe_devices(Needs(cuda=True), machine=machine))
    assert all(finding.status is Status.OK for finding in findings), findings
    print([finding.text for finding in findings])


def test_a_kernel_compiles_for_this_device() -> None:
    (finding,) = probe_compiler(Needs(cuda=True))
    assert finding.status is Status.OK, finding


def test_rates_are_measured() -> None:
    """Slower than any PCIe or NVLink-C2C link would be a mistake of the measurement, and so would be faster than it."""
    rates = Rates.measure(0)
    assert all(2.0 < rate < 600.0 for rate in (rates.to_device, rates.to_host, rates.gather)), rates
    (finding,) = probe_rates(Needs(), machine=Machine(devices=Machine.find().devices[:1], driver_cuda=(13, 0),
                                                      torch_cuda=(13, 0)), measure=lambda index: rates)
    assert finding.status in (Status.OK, Status.WARN)
    print(finding.text)
