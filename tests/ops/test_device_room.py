"""Clusters and shared memory that a device may lack: what the driver is asked, and what is done about its answer."""

from __future__ import annotations

import ctypes
import importlib

import pytest
import torch

from hisparse.errors import ConfigError
from hisparse.ops.cuda import attention_cluster, driver, indexer
from hisparse.ops.cuda.driver import DriverError
from hisparse.ops.cuda.module import Instance

resolver = importlib.import_module("hisparse.ops.cuda.resolve")  # the package has a function of this name
Geometry = resolver.Geometry


class Driver:
    """Answers (status, clusters); writes down what it was asked, read as C reads it."""

    def __init__(self, status: int, clusters: int) -> None:
        self.answer, self.asked = (status, clusters), []

    def cuOccupancyMaxActiveClusters(self, found, function, config):
        at = ctypes.addressof(config._obj)
        grid_and_block = tuple((ctypes.c_uint * 6).from_address(at))
        shared, stream = ctypes.c_uint.from_address(at + 24).value, ctypes.c_void_p.from_address(at + 32).value
        attributes, number = ctypes.c_void_p.from_address(at + 40).value, ctypes.c_uint.from_address(at + 48).value
        key, dimensions = ctypes.c_int.from_address(attributes).value, tuple((ctypes.c_uint * 3).from_address(attributes + 8))
        self.asked.append((function.value, grid_and_block, shared, stream, number, key, dimensions))
        status, found._obj.value = self.answer
        return status

    def cuDeviceGetAttribute(self, value, attribute, device):
        self.asked.append((attribute, device))
        value._obj.value = 232_448
        return 0

    def cuFuncGetAttribute(self, value, attribute, function):
        self.asked.append((attribute, function.value))
        value._obj.value = 19_000
        return 0

    def cuGetErrorName(self, code, text):
        text._obj.value = b"CUDA_ERROR_WHY"
        return 0


def answering(monkeypatch: pytest.MonkeyPatch, status: int, clusters: int) -> Driver:
    made = Driver(status, clusters)
    monkeypatch.setattr(driver, "library", lambda: made)
    return made


def test_the_driver_is_asked_for_one_cluster_of_the_launch(monkeypatch):
    made = answering(monkeypatch, 0, 7)
    assert driver.max_active_clusters(0x77, 16, 256, 50_000) == 7
    assert made.asked == [(0x77, (16, 1, 1, 256, 1, 1), 50_000, None, 1, 4, (16, 1, 1))]
    assert ctypes.sizeof(driver._Attribute) == 72 and ctypes.sizeof(driver._LaunchConfig) == 56  # as in cuda.h


def test_an_impossible_size_is_no_room_and_anything_else_an_error(monkeypatch):
    answering(monkeypatch, 912, -1)
    assert driver.max_active_clusters(1, 16, 256, 0) == 0
    answering(monkeypatch, 400, 3)
    with pytest.raises(DriverError, match="room for clusters of 16 CTAs: CUDA_ERROR_WHY"):
        driver.max_active_clusters(1, 16, 256, 0)


def test_a_functions_own_shared_memory_comes_off_the_devices(monkeypatch):
    made = answering(monkeypatch, 0, 1)
    assert driver.most_shared_bytes(0x77, 3) == 213_448 and made.asked == [(97, 3), (1, 0x77)]


class Function:
    """A loaded instance on a device that has room for clusters of at most `largest` CTAs."""

    def __init__(self, defines: dict[str, int], largest: int) -> None:
        self.defines, self.largest, self.calls = defines, largest, []

    def allow_large_clusters(self) -> None:
        self.calls.append("large")

    def allow_shared_bytes(self, num_bytes: int) -> None:
        self.calls.append(num_bytes)

    def most_shared_bytes(self) -> int:
        return 213_448

    def has_room(self, cluster: int, threads: int, shared_bytes: int) -> bool:
        assert cluster == self.defines["CLUSTER"] and threads == self.defines["THREADS"]
        self.calls.append(("room", shared_bytes))
        return cluster <= self.largest


@pytest.fixture
def device(monkeypatch):
    """device(largest) -> list of the instances that are loaded from now on."""

    def with_room_for(largest: int) -> list[Function]:
        made: list[Function] = []

        def kernel(source: str, function: str, **defines: int) -> Function:
            made.append(Function(defines, largest))
            return made[-1]

        monkeypatch.setattr(resolver, "kernel", kernel)
        resolver._loaded.cache_clear()
        return made

    yield with_room_for
    resolver._loaded.cache_clear()


def test_room_is_asked_once_behind_the_limits(device):
    made, geometry = device(16), Geometry.choose(1, 1, 2048, 4096)
    for _ in range(3):
        kernel, found, shared = resolver._loaded(geometry, 656, 64, 4096, 64, 0)
    assert found is geometry and found.cluster == 16 and shared == geometry.shared_bytes(4096, 64)
    assert kernel is made[0] and len(made) == 1 and kernel.calls == ["large", shared, ("room", shared)]


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("slots", [2048, 4096, 32768])
def test_without_room_for_16_clusters_are_those_of_a_larger_batch(device, hashed, slots):
    """A batch of 16 gets clusters of 8 anyway, so what a device without room for more is given has run everywhere."""
    made = device(8)
    kernel, found, shared = resolver._loaded(Geometry.choose(1, 1, 2048, slots, hashed=hashed), 656, 64, slots, slots // 64, 0)
    assert found == Geometry.choose(16, 1, 2048, slots, hashed=hashed) and found.cluster == 8
    assert kernel is made[1] and kernel.calls == [shared, ("room", shared)] and shared == found.shared_bytes(slots, slots // 64)


def test_no_room_at_all_is_refused_with_the_fix(device):
    made = device(4)
    with pytest.raises(ConfigError, match=r"cuda:2 cannot run the resolver: .* cluster of 8 CTAs of 256 threads and \d+ bytes "
                                          r"of shared memory; use a whole GPU or a larger MIG slice"):
        resolver._loaded(Geometry.choose(1, 1, 2048, 4096), 656, 64, 4096, 64, 2)
    assert [function.defines["CLUSTER"] for function in made] == [16, 8]


@pytest.fixture
def attention_device(monkeypatch):
    """As `device`, for sparse MLA."""

    def with_room_for(largest: int) -> list[Function]:
        made: list[Function] = []

        def load(instance: Instance) -> Function:
            made.append(Function({**instance.defines, "THREADS": attention_cluster.THREADS}, largest))
            return made[-1]

        monkeypatch.setattr(attention_cluster, "load", load)
        monkeypatch.setattr(attention_cluster, "compile_ahead", lambda instances: None)
        attention_cluster._loaded.cache_clear()
        return made

    yield with_room_for
    attention_cluster._loaded.cache_clear()


@pytest.mark.parametrize(("largest", "heads", "found"), [(16, 16, (16, 16)), (8, 16, (8, 64)), (15, 64, (8, 64))])
def test_sparse_mla_takes_smaller_clusters_where_large_ones_have_no_room(attention_device, largest, heads, found):
    made, shared = attention_device(largest), attention_cluster.SHARED_BYTES
    for _ in range(3):
        kernel, *shape = attention_cluster._loaded(16, heads, True, 0)
    assert tuple(shape) == found and kernel is made[-1] and len(made) == (1 if found[0] == 16 else 2)
    assert (kernel.defines["CLUSTER"], kernel.defines["BLOCK_HEADS"], kernel.defines["FP8"]) == (*found, 1)
    assert kernel.calls == [*(["large"] if found[0] == 16 else []), shared, ("room", shared)]


def test_sparse_mla_without_room_at_all_is_refused_with_the_fix(attention_device):
    attention_device(3)
    with pytest.raises(ConfigError, match=r"cuda:1 cannot run sparse MLA: .* cluster of 8 CTAs of 384 threads and \d+ bytes of "
                                          r"shared memory; use a whole GPU or a larger MIG slice"):
        attention_cluster._loaded(16, 16, False, 1)
    assert attention_cluster._loaded(3, 64, False, 1)[1:] == (3, 64)


@pytest.mark.parametrize(("heads", "dim", "keys", "needed"), [
    (128, 256, torch.float32, 2 * 128 * 256 * 4), (128, 256, torch.bfloat16, 6 * 32 * 512 + 2 * 128 * 256 * 2)])
def test_an_indexer_that_does_not_fit_is_refused_with_the_fix(monkeypatch, heads, dim, keys, needed):
    made = []
    monkeypatch.setattr(indexer, "kernel", lambda source, function, **defines: made.append(Function({}, 1)) or made[-1])
    indexer._scores_kernel.cache_clear()
    try:
        with pytest.raises(ConfigError, match=rf"cuda:1 cannot score indexer keys of 256 values \({keys}\) with 128 heads: a "
                                              rf"CTA needs {needed} bytes .* has 213448; load the model in bfloat16"):
            indexer._scores_kernel(heads, dim, 64, keys, False, True, 1)
        assert made[0].calls == []
        _, shared = indexer._scores_kernel(64, 128, 64, keys, False, True, 1)
        assert made[1].calls == [shared] and shared <= 213_448
    finally:
        indexer._scores_kernel.cache_clear()
