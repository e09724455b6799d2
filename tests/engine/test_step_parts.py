"""What a step is made of, without a model: packed rows, sizes of graphs, tokens on their way, the device that is asked for."""

from __future__ import annotations

import pytest
import torch

from hisparse.config import ModelConfig
from hisparse.engine.decode_graphs import batch_sizes
from hisparse.engine.device import check_devices, check_room, open_device
from hisparse.engine.packed_rows import pack, unpack, upload
from hisparse.engine.sampler import SampleRow
from hisparse.engine.step_output import NO_TOKEN, StepOutput, greedy
from hisparse.errors import ConfigError, InvariantError
from hisparse.ops.status import NO_PAGE
from hisparse.types import SamplingParams, ScheduledChunk

CPU = torch.device("cpu")


def chunk(seat: int, first: int, tokens: tuple[int, ...], **options: bool) -> ScheduledChunk:
    return ScheduledChunk(request_id=f"r{seat}", seat=seat, first_position=first, token_ids=tokens, **options)


def test_rows_survive_packing_and_the_rest_is_padding() -> None:
    packed = pack([chunk(3, 5, (7, 8)), chunk(0, 9, (1,), writes=False)], 5)
    rows = unpack(upload(packed, CPU))
    assert rows.token_ids.tolist() == [7, 8, 1, 0, 0] and rows.positions.tolist() == [5, 6, 9, 0, 0]
    assert rows.seats.tolist() == [3, 3, 0, -1, -1] and rows.writes.tolist() == [True, True, False, False, False]
    assert rows.seats.dtype == torch.int32 and rows.positions.dtype == torch.int64 and rows.positions.is_contiguous()
    assert pack([chunk(3, 5, (7, 8))]) == [7, 8, 5, 6, 3, 3, 1, 1]


def test_an_upload_into_a_longer_buffer_fills_its_front() -> None:
    buffer = torch.full((12,), 99)
    front = upload(pack([chunk(1, 2, (4,))], 2), CPU, buffer)
    assert front.data_ptr() == buffer.data_ptr() and buffer.tolist() == [4, 0, 2, 0, 1, -1, 1, 0, 99, 99, 99, 99]


@pytest.mark.parametrize(("seats", "sizes"), [(1, (1,)), (2, (1, 2)), (12, (1, 2, 4, 8, 12)), (16, (1, 2, 4, 8, 16))])
def test_sizes_of_graphs(seats: int, sizes: tuple[int, ...]) -> None:
    assert batch_sizes(seats) == sizes


def test_greedy_takes_the_first_of_equals_and_refuses_what_is_not_finite() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [float("nan"), 0.0, 1.0], [0.0, float("inf"), 1.0], [2.0, 1.0, 0.0]])
    assert greedy(logits).tolist() == [1, NO_TOKEN, NO_TOKEN, 0]


def output(status: list[int], tokens: list[int], params: list[SamplingParams | None], logits: list[torch.Tensor]) -> StepOutput:
    rows = [SampleRow(request_id=f"r{i}", position=10 + i, params=item) for i, item in enumerate(params)]
    columns = [4 + 2 * i for i in range(len(rows))]  # tokens need not adjoin
    result = torch.tensor(status + [value for token in tokens for value in (token, 77)], dtype=torch.int32)
    return StepOutput(rows, result, columns, logits)


def test_tokens_of_a_step_and_the_logits_that_were_asked_for() -> None:
    warm = SamplingParams(temperature=1.0)
    assert [row.needs_logits for row in output([0] * 4, [5, 6, 7], [None, warm, SamplingParams(logprobs=0)], []).rows] == [
        False, True, True]
    tokens, logits = output([0] * 4, [5, 6], [None, warm], [torch.arange(3.0)]).take()
    assert tokens == [5, 6] and logits is not None and logits.tolist() == [[0, 1, 2]]
    assert output([0] * 4, [], [], []).take() == ([], None)


def test_nothing_leaves_a_step_that_went_wrong() -> None:
    with pytest.raises(InvariantError, match=r"neither resident nor on the host \(first: seat 3, position 130, detail 2\)"):
        output([NO_PAGE, 3, 130, 2], [5, 6], [None, None], []).take()
    with pytest.raises(InvariantError, match="logits are not finite for r1@11; no token can be chosen"):
        output([0] * 4, [5, NO_TOKEN], [None, None], []).take()


def test_a_device_that_is_not_there_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_device(ModelConfig(path="recall")) == CPU
    cuda = ModelConfig(path="recall", device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"model.device = cuda, but torch .*(sees no|without CUDA).* set model.device to cpu"):
        open_device(cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="rank 2 needs a GPU of its own, this process sees 2"):
        open_device(cuda, rank=2)
    check_devices(cuda, 2)
    with pytest.raises(ConfigError, match="tensor_parallel_size = 4 needs as many GPUs, this process sees 2"):
        check_devices(cuda, 4)


def test_a_pool_that_does_not_fit_the_device_is_refused_with_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    cuda = torch.device("cuda", 0)
    check_room(CPU, 1 << 60, 1000)
    check_room(cuda, 3 << 30, 1000)
    with pytest.raises(ConfigError, match=r"device_blocks = 1000 needs 4.00 GiB, but 3.00 of 8.00 GiB of a GPU .* below 750"):
        check_room(cuda, 4 << 30, 1000)
