"""Where an engine's host pool lives when no shared segment can be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hisparse.actors.engine import EngineActors, EngineIdentity
from hisparse.actors.keeper import KeeperActor
from hisparse.actors.rank_worker import RankSetup, RankWorkerActor
from hisparse.config import load_config
from hisparse.errors import ConfigError
from hisparse.worker import host_memory


class LocalKeeper:
    """The keeper's actor handle, without an actor."""

    def __init__(self, directory: Path) -> None:
        self.keeper, self.killed = KeeperActor("decode-1", str(directory)), False

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return getattr(self.keeper, method)(*args)

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def small_shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tmpfs that is too small, as Docker's /dev/shm of 64 MB often is."""
    def refuse(path: Path, needed_bytes: int, available_bytes: int | None = None) -> None:
        raise ConfigError(f"the shared host pool needs {needed_bytes} bytes in {path.parent}, which has 65536 bytes free")

    monkeypatch.setattr(host_memory, "check_file_room", refuse)
    return tmp_path


def engine(pool: str, ranks: int = 1) -> EngineActors:
    config = load_config({"model": {"path": "recall", "max_model_len": 512}, "tensor_parallel_size": ranks,
                          "cache": {"host_pool_gib": 0.01, "host_pool": pool}}, environ={})
    return EngineActors(config, EngineIdentity.new("decode"))


def test_a_single_rank_falls_back_to_private_memory(small_shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    alone, keeper = engine("auto"), LocalKeeper(small_shm)
    alone._share_pool(keeper, 5.0)  # type: ignore[arg-type]
    assert alone.segment is None and alone.keeper is None and keeper.killed
    assert "65536 bytes free" in caplog.text and list(small_shm.iterdir()) == []
    setup = RankSetup(engine_id="decode-1", incarnation=1, rank=0, segment=alone.segment, rendezvous="")
    pool = RankWorkerActor(alone.config)._open_pool(setup)
    assert pool is not None and not pool.is_shared and pool.path is None and pool.mapped_bytes > pool.nbytes
    pool.close()


@pytest.mark.parametrize(("pool", "ranks"), [("shared", 1), ("auto", 2), ("shared", 2)])
def test_who_needs_a_shared_pool_is_refused(small_shm: Path, pool: str, ranks: int) -> None:
    with pytest.raises(ConfigError, match="65536 bytes free"):
        engine(pool, ranks)._share_pool(LocalKeeper(small_shm), 5.0)  # type: ignore[arg-type]


def test_with_room_the_pool_is_shared(tmp_path: Path) -> None:
    shared, keeper = engine("auto"), LocalKeeper(tmp_path)
    shared._share_pool(keeper, 5.0)  # type: ignore[arg-type]
    assert shared.segment is not None and Path(shared.segment.path).parent == tmp_path and not keeper.killed
    keeper.keeper.stop()
