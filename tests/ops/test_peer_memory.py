"""Mappings of other processes' GPU memory, on a driver that is played here. Real ones are in tests/gpu."""

from __future__ import annotations

import pytest

from hisparse.ops.cuda import driver
from hisparse.ops.cuda.driver import DriverError
from hisparse.ops.cuda.peer_memory import HANDLE_BYTES, PeerMemory


class Driver:
    """Maps at 4096; `knows`: it can say what allocation that is."""

    def __init__(self, knows):
        self.knows, self.mapped = knows, 0

    def cuIpcOpenMemHandle_v2(self, address, handle, flags):
        address._obj.value = 4096
        self.mapped += 1
        return 0

    def cuIpcCloseMemHandle(self, address):
        assert address.value == 4096
        self.mapped -= 1
        return 0

    def cuMemGetAddressRange_v2(self, base, size, address):
        base._obj.value, size._obj.value = address.value, 1 << 20
        return 0 if self.knows else 1

    def cuGetErrorName(self, code, text):
        text._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


@pytest.mark.parametrize("knows", [True, False])
def test_an_open_that_fails_leaves_no_mapping(monkeypatch: pytest.MonkeyPatch, knows: bool) -> None:
    library = Driver(knows)
    monkeypatch.setattr(driver, "library", lambda: library)
    gpu = PeerMemory.__new__(PeerMemory)  # without a device
    if knows:
        assert gpu.open(bytes(HANDLE_BYTES)) == (4096, 1 << 20) and library.mapped == 1
        gpu.close(4096)
    else:
        with pytest.raises(DriverError, match="cuMemGetAddressRange"):
            gpu.open(bytes(HANDLE_BYTES))
    assert not library.mapped
