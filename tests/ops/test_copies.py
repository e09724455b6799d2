"""Replay, page copies, seat resets, and where the kernels are."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from hisparse import ops
from hisparse.errors import ConfigError, InvariantError
from hisparse.ops import HotState, MissPlan, reference, sources

NAN = float("nan")


def test_replay_repeats_the_plan_in_the_followers_rows():
    rows, host = torch.full((32, 2), NAN), torch.arange(20, dtype=torch.float32).view(10, 2)
    plan = MissPlan(host_rows=torch.tensor([3, 8]), device_rows=torch.tensor([16, 9]), rows=torch.tensor([0, 0]))
    reference.replay(plan, 4, rows, host)
    assert rows[20].tolist() == [6, 7] and rows[13].tolist() == [16, 17] and int(rows.isnan().all(1).sum()) == 30


def filled() -> HotState:
    """Two seats, 8 slots; seat 0 holds positions 30..37 in slots 7..0, seat 1 holds 40 in slot 0."""
    state = HotState.empty(2, 8, 64)
    for slot in range(8):
        state.slot_tag[0, slot], state.pos_slot[0, 37 - slot], state.use[0, slot] = 37 - slot, slot, 1 + slot % 3
    state.slot_tag[1, 0], state.pos_slot[1, 40], state.use[1, 0] = 40, 0, 2
    state.hand[:] = torch.tensor([5, 1])
    state.check(torch.tensor([8, 8]))
    return state


@pytest.mark.parametrize(
    ("from_slot", "from_position", "left", "hand"),
    [
        (0, 0, [], 0),
        (4, -1, [37, 36, 35, 34], 0),
        (6, -1, [37, 36, 35, 34, 33, 32], 5),
        (-1, 34, [33, 32, 31, 30], 5),
        (-1, -1, [37, 36, 35, 34, 33, 32, 31, 30], 5),
        (6, 36, [35, 34, 33, 32], 5),
        (8, 64, [37, 36, 35, 34, 33, 32, 31, 30], 5),
    ],
)
def test_reset_seat(from_slot, from_position, left, hand):
    state = filled()
    reference.reset_seat(state, 0, from_slot=from_slot, from_position=from_position)
    assert [t for t in state.slot_tag[0].tolist() if t >= 0] == left and int(state.hand[0]) == hand
    assert sorted((state.pos_slot[0] >= 0).nonzero().flatten().tolist()) == sorted(left)
    assert int((state.use[0] > 0).sum()) == len(left)
    assert state.slot_tag[1, 0] == 40 and int(state.hand[1]) == 1 and int(state.use[1, 0]) == 2
    state.check(torch.tensor([8, 8]))


def test_state_check_finds_each_inconsistency():
    for damage in ("slot_tag", "pos_slot", "use", "size"):
        state = filled()
        if damage == "slot_tag":
            state.slot_tag[0, 1] = 12
        elif damage == "pos_slot":
            state.pos_slot[1, 3] = 5
        elif damage == "use":
            state.use[1, 4] = 1
        with pytest.raises(InvariantError, match=r"disagree|tagged|counter|beyond"):
            state.check(torch.tensor([8 if damage != "size" else 7, 8]))


def test_backend_is_chosen_by_device():
    assert ops.backend("cpu") is reference and ops.backend(torch.device("cpu")) is reference
    assert ops.backend("cuda:1").__name__ == "hisparse.ops.cuda"
    with pytest.raises(ConfigError, match=r"no operations for device 'meta'.*\['cpu', 'cuda'\]"):
        ops.backend("meta")


def test_kernel_sources_of_a_checkout_and_of_a_wheel(tmp_path, monkeypatch):
    here = ops.kernel_sources()
    assert here == Path(ops.__file__).resolve().parents[2] / "kernels" and (here / "README.md").is_file()
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "site-packages" / "hisparse" / "ops" / "sources.py"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme=None: str(tmp_path / (scheme or "prefix")))
    (tmp_path / "site-packages" / "kernels").mkdir(parents=True)  # somebody else's package: no pyproject.toml beside it
    with pytest.raises(ConfigError, match=r"kernel sources not found in .*prefix/share/hisparse/kernels"):
        ops.kernel_sources()
    shipped = tmp_path / "prefix" / "share" / "hisparse" / "kernels"
    shipped.mkdir(parents=True)
    assert ops.kernel_sources() == shipped
