"""What a launch hands to the driver, on a driver that writes down what it is given. Real launches are in tests/gpu."""

from __future__ import annotations

import ctypes
import struct

import pytest
import torch

from hisparse.errors import InvariantError
from hisparse.ops.cuda import driver
from hisparse.ops.cuda.module import Kernel


class Refusal(RuntimeError):
    """As CuPy raises it."""

    def __init__(self, status: int, name: str) -> None:
        super().__init__(f"{name}: no more words")
        self.status = status


class Driver:
    """Parameters as (offset, bytes); what the next launches raise, then success."""

    def __init__(self, parameters):
        self.parameters, self.refusals, self.launches, self.attributes, self.bound = parameters, [], [], [], []

    def cuFuncGetParamInfo(self, function, index, offset, size):
        if index.value >= len(self.parameters):
            return 1
        offset._obj.value, size._obj.value = self.parameters[index.value]
        return 0

    def cuFuncSetAttribute(self, function, attribute, value):
        self.attributes.append((function.value, attribute, value))
        return 0

    def launch(self, function, x, y, z, threads, y_threads, z_threads, shared, stream, pointers, extra):
        key, block, size_key, size, end = (ctypes.c_void_p * 5).from_address(extra)
        assert (key, size_key, end, pointers) == (1, 2, None, 0)
        block = ctypes.string_at(block, ctypes.c_size_t.from_address(size).value)
        self.launches.append((function, (x, y, z), (threads, y_threads, z_threads), shared, stream, block))
        if self.refusals:
            raise self.refusals.pop(0)


@pytest.fixture
def fake(monkeypatch):
    def make(*parameters):
        made = Driver(parameters)
        monkeypatch.setattr(driver, "library", lambda: made)
        monkeypatch.setattr(driver, "launch_calls", lambda: (made.launch, lambda device: 0xAB + device))
        monkeypatch.setattr(driver, "bind_context", made.bound.append)
        return made

    return make


POINTER_INT_FLOAT_INT = ((0, 8), (8, 8), (16, 4), (24, 8))


def test_a_launch_is_one_call_with_the_parameters_where_c_has_them(fake):
    made = fake(*POINTER_INT_FLOAT_INT)
    launch = Kernel(0x77, "k.cu:k", 3)
    launch((5, 2), 64, (None, -(1 << 40), 0.5, True), 1024)
    launch([7], 32, [0, 1, 2.0, 3])
    first, second = made.launches
    assert first == (0x77, (5, 2, 1), (64, 1, 1), 1024, 0xAE, struct.pack("<qqfxxxxq", 0, -(1 << 40), 0.5, 1))
    assert second[1:4] == ((7, 1, 1), (32, 1, 1), 0) and second[-1] == struct.pack("<qqfxxxxq", 0, 1, 2.0, 3)
    launch.allow_shared_bytes(100_000)
    launch.allow_shared_bytes(60_000)  # somebody else launches it with 100,000
    launch.allow_large_clusters()
    assert made.attributes == [(0x77, 8, 100_000), (0x77, 14, 1)]


def test_a_kernel_without_parameters(fake):
    made = fake()
    Kernel(1, "nothing", 0)((1,), 32, ())
    assert made.launches[0][-1] == b""


@pytest.mark.parametrize("args", [(None, 1, 0.5), (None, 1, 0.5, 1, 1), (None, 0.5, 0.5, 1), (None, 1 << 63, 0.5, 1)])
def test_arguments_that_do_not_fit_are_not_launched(fake, args):
    made = fake(*POINTER_INT_FLOAT_INT)
    with pytest.raises(InvariantError, match=rf"k.cu:k takes =qqfxxxxq .* got {len(args)} arguments"):
        Kernel(1, "k.cu:k", 0)((1,), 32, args)
    assert made.launches == []


def test_a_tensor_on_the_cpu_is_refused(fake):
    made = fake((0, 8))
    with pytest.raises(InvariantError, match=r"k: a tensor of \[3\] is on cpu"):
        Kernel(1, "k", 0)((1,), 32, (torch.zeros(3),))
    assert made.launches == []


@pytest.mark.parametrize("parameters", [((0, 2),), ((0, 8), (8, 12)), tuple((8 * i, 8) for i in range(65))])
def test_functions_of_other_parameters_are_refused(fake, parameters):
    fake(*parameters)
    with pytest.raises(InvariantError, match="kernels take pointers, long long, float and structs|more than 64"):
        Kernel(1, "k", 0)


def test_a_struct_is_given_as_bytes(fake):
    made = fake((0, 20), (24, 8))
    Kernel(1, "k", 0)((1,), 32, (b"abc", 7))
    assert made.launches[0][-1] == b"abc" + bytes(21) + struct.pack("<q", 7)


def test_a_thread_that_used_no_device_yet_gets_its_context_once(fake):
    made = fake((0, 8))
    launch = Kernel(1, "k", 2)
    made.refusals = [Refusal(201, "CUDA_ERROR_INVALID_CONTEXT")]
    launch((1,), 32, (0,))
    assert made.bound == [2] and len(made.launches) == 2
    made.refusals = [Refusal(201, "CUDA_ERROR_INVALID_CONTEXT")] * 2
    with pytest.raises(driver.DriverError, match="INVALID_CONTEXT"):
        launch((1,), 32, (0,))


@pytest.mark.parametrize(("status", "name"), [(1, "CUDA_ERROR_INVALID_VALUE"), (700, "CUDA_ERROR_ILLEGAL_ADDRESS")])
def test_a_refused_launch_says_what_was_launched(fake, status, name):
    made = fake((0, 8))
    made.refusals = [Refusal(status, name)]
    with pytest.raises(driver.DriverError, match=rf"k.cu:k, grid \[9, 2, 1\] of 64 threads .* cuda:1: {name}"):
        Kernel(1, "k.cu:k", 1)((9, 2), 64, (0,), 16)
    assert made.bound == [] and len(made.launches) == 1
