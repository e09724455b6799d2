"""Mappings of other processes' GPU memory, on a driver that is played here. Real ones are in tests/gpu."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hisparse.ops.cuda import driver, pages
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


def test_a_read_of_many_pieces_is_several_launches_that_have_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[int, int, np.ndarray]] = []

    def loaded(instance: object, size: int, device: int) -> object:
        def launch(grid: tuple[int], threads: int, args: tuple[bytes, int]) -> None:
            assert len(args[0]) == args[1] * 24 <= size * 24 <= 32_764 - 8, "a launch's parameters have room for so many bytes"
            launches.append((size, grid[0], np.frombuffer(args[0], dtype=np.int64).reshape(-1, 3)))
        return launch

    monkeypatch.setattr(pages, "_loaded", loaded)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    small, large = pages.LIST_PIECES
    for num, sizes in ((3, [small]), (small, [small]), (small + 1, [large]), (2 * large + 5, [large, large, small])):
        launches.clear()
        pieces = np.arange(3 * num, dtype=np.int64).reshape(num, 3)
        pages.read_pieces(pieces, ctas=16)
        assert [size for size, *_ in launches] == sizes and all(grid == min(16, len(part)) for _, grid, part in launches)
        assert (np.concatenate([part for *_, part in launches]) == pieces).all()
