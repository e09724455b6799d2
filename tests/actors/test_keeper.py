from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hisparse.actors.keeper import KeeperActor, remove
from hisparse.config import HiSparseConfig, kv_layout, load_config
from hisparse.errors import ConfigError, InvariantError
from hisparse.worker.host_pool import HostPool


def config(gib: float = 0.01) -> HiSparseConfig:
    return load_config({"model": {"path": "recall", "max_model_len": 512}, "cache": {"host_pool_gib": gib}}, environ={})


def test_create_attach_stop(tmp_path: Path) -> None:
    keeper = KeeperActor("decode-1", str(tmp_path))
    with pytest.raises(InvariantError):
        keeper.segment()
    segment = keeper.create(config())
    assert keeper.segment() == segment and Path(segment.path).stat().st_size == segment.nbytes
    pool = HostPool.attach(kv_layout(config()), segment.num_blocks, segment.path)
    pool.rows(0)[5, 0] = 7.0
    with pytest.raises(InvariantError, match="exists already"):
        keeper.create(config())
    keeper.stop()
    keeper.stop()
    assert list(tmp_path.iterdir()) == []
    assert pool.rows(0)[5, 0] == 7.0, "a rank that still maps the pool keeps its bytes"
    pool.close()


def test_b37_what_does_not_fit_is_refused_before_a_file_exists(tmp_path: Path) -> None:
    keeper = KeeperActor("decode-1", str(tmp_path))
    with pytest.raises(ConfigError, match="needs .* free"):
        keeper.create(config(gib=1e6))
    assert list(tmp_path.iterdir()) == []


def test_b37_after_kill_the_next_start_sweeps_and_never_takes_a_living_one(tmp_path: Path) -> None:
    living = KeeperActor("decode-2", str(tmp_path))
    kept = living.create(config())
    code = ("import sys, time; from hisparse.actors.keeper import KeeperActor; "
            "from tests.actors.test_keeper import config; k = KeeperActor('decode-1', sys.argv[1]); k.create(config()); "
            "print('ready', flush=True); time.sleep(60)")
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True,
                             cwd=Path(__file__).parents[2], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    assert len(list(tmp_path.iterdir())) == 2
    child.send_signal(signal.SIGKILL)
    child.wait()
    fresh = KeeperActor("decode-1", str(tmp_path))
    segment = fresh.create(config())
    assert sorted(map(str, tmp_path.iterdir())) == sorted([kept.path, segment.path])
    fresh.stop()
    living.stop()


def test_remove_is_for_keepers_that_died(tmp_path: Path) -> None:
    segment = KeeperActor("decode-1", str(tmp_path)).create(config())
    remove(segment)
    remove(segment)
    assert list(tmp_path.iterdir()) == []
