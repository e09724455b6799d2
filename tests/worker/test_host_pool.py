"""Host pools: layout, headers, two processes, life cycle, and the checks that come before memory is taken."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch

from hisparse.errors import ConfigError, InvariantError
from hisparse.worker import HostPool, host_memory
from tests.worker.rig import make_layout

LAYOUT = make_layout()


def pool_bytes(blocks):
    return blocks * LAYOUT.host_block_bytes


@pytest.fixture
def pools():
    made = []
    yield made
    for pool in made:
        pool.close()
        pool.unlink()


def child(code, *args, **kwargs):
    """A process that has imported what the snippets need; prints a line when it is ready."""
    text = "import os, sys, time\nfrom tests.worker.rig import make_layout\nfrom hisparse.worker import HostPool, host_memory\n"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", text + textwrap.dedent(code), *map(str, args)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env=env,
        **kwargs,
    )


def check_shape(pool):
    assert pool.nbytes == pool_bytes(6) and pool.address % 4096 == 0
    for layer in range(LAYOUT.shape.num_layers):
        rows = pool.rows(layer)
        assert rows.shape == (6 * LAYOUT.block_size, LAYOUT.row.row_elems)
        for block in range(6):
            address = rows[block * LAYOUT.block_size].data_ptr()
            assert address - pool.address == LAYOUT.host_page_byte_offset(layer, block, 6)
    assert pool.keys.shape == (6, 32) and pool.row_masks.dtype == pool.generations.dtype == np.uint64


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_layer_outermost_layout_and_headers(kind, tmp_path, pools):
    pool = HostPool.private(LAYOUT, 6) if kind == "private" else HostPool.shared(LAYOUT, 6, tmp_path / "hisparse-a.pool")
    pools.append(pool)
    check_shape(pool)
    pool.keys[3] = 7
    pool.hand_out((3, 5), (11, 2**64 - 1), 2**63 + 5)
    assert pool.generations.tolist() == [0, 0, 0, 11, 0, 2**64 - 1] and not pool.keys.any()
    pool.row_masks[[3, 5]] = (0b1001, 0b10)
    assert pool.row_masks.tolist() == [0, 0, 0, 0b1001, 0, 0b10] and pool.incarnations[5] == 2**63 + 5
    pool.hand_out((3,), (12,), 1)
    assert pool.row_masks.tolist() == [0, 0, 0, 0, 0, 0b10] and pool.full_mask == 15
    assert all(not bool(pool.rows(layer).any()) for layer in range(7))  # headers and body do not overlap


def test_a_full_mask_of_64_rows_fits():
    pool = HostPool.private(make_layout(block_size=64), 2)
    pool.row_masks[1] = pool.full_mask
    assert int(pool.row_masks[1]) == 2**64 - 1
    pool.close()


def test_two_processes_see_the_same_rows_and_headers(tmp_path, pools):
    path = tmp_path / "hisparse-two.pool"
    pools.append(HostPool.shared(LAYOUT, 6, path, poison=True))
    peer = child(
        """
        pool = HostPool.attach(make_layout(), 6, sys.argv[1])
        assert pool.is_shared and bool(pool.rows(6)[5].isnan().all())
        print("ready", flush=True); sys.stdin.readline()
        assert [float(pool.rows(layer)[9][0]) for layer in range(7)] == [1000.0 * layer + 9 for layer in range(7)]
        assert int(pool.row_masks[2]) == 2 and int(pool.generations[2]) == 41 and pool.keys[2].tolist() == [3] * 32
        pool.rows(4)[13] = 4.5
        pool.close(); print("done", flush=True)
    """,
        path,
    )
    assert peer.stdout.readline() == "ready\n"
    for layer in range(7):
        pools[0].rows(layer)[9] = 1000.0 * layer + 9
    pools[0].hand_out((2,), (41,), 1)
    pools[0].row_masks[2] = 0b10
    pools[0].keys[2] = 3
    peer.stdin.write("\n")
    peer.stdin.flush()
    assert peer.stdout.readline() == "done\n" and peer.wait(10) == 0
    assert float(pools[0].rows(4)[13][0]) == 4.5


def test_attach_fails_in_time_and_says_why(tmp_path, pools):
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"cannot attach to .*missing.pool within 0.2 s: it does not exist"):
        HostPool.attach(LAYOUT, 6, tmp_path / "missing.pool", timeout_s=0.2)
    (tmp_path / "young.pool").write_bytes(bytes(8192))
    with pytest.raises(ConfigError, match="its owner has not finished creating it"):
        HostPool.attach(LAYOUT, 6, tmp_path / "young.pool", timeout_s=0.2)
    (tmp_path / "other.pool").write_bytes(b"x" * 8192)
    with pytest.raises(ConfigError, match="no host pool of this version"):
        HostPool.attach(LAYOUT, 6, tmp_path / "other.pool", timeout_s=5)
    pools.append(HostPool.shared(LAYOUT, 6, tmp_path / "hisparse-x.pool"))
    with pytest.raises(ConfigError, match=r"holds 6 pages of layout .*, expected 7"):
        HostPool.attach(LAYOUT, 7, tmp_path / "hisparse-x.pool", timeout_s=5)
    with pytest.raises(ConfigError, match="every rank must use the configuration its keeper has"):
        HostPool.attach(make_layout(block_size=8), 6, tmp_path / "hisparse-x.pool", timeout_s=5)
    os.truncate(tmp_path / "hisparse-x.pool", 8192)
    with pytest.raises(ConfigError, match="has 8192 bytes, expected"):
        HostPool.attach(LAYOUT, 6, tmp_path / "hisparse-x.pool", timeout_s=5)
    assert time.monotonic() - start < 3


def test_close_and_unlink_are_idempotent_and_spare_views(tmp_path):
    pool = HostPool.shared(LAYOUT, 6, tmp_path / "hisparse-c.pool")
    rows = pool.rows(2)
    rows[5] = 1.5
    for _ in range(2):
        pool.close()
        pool.unlink()
    assert float(rows[5][0]) == 1.5 and not list(tmp_path.iterdir())
    with pytest.raises(InvariantError, match="closed"):
        pool.rows(0)
    private = HostPool.private(LAYOUT, 6)
    private.close()
    private.unlink()


def test_b36_private_pools_of_all_ranks_must_fit_together():
    """Four ranks of 160 GiB on 440 GiB are refused before anything is allocated; one shared pool is counted once."""
    blocks = (160 << 30) // LAYOUT.host_block_bytes
    with pytest.raises(ConfigError, match=r"a private host pool on each of 4 ranks needs \d+ bytes \(6[46]\d.*440.00 GiB"):
        HostPool.private(LAYOUT, blocks, ranks_on_node=4, available_bytes=440 << 30)
    host_memory.check_memory(160 << 30, what="one pool", available_bytes=440 << 30)


def test_available_memory_is_the_lesser_of_node_and_cgroup(tmp_path):
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:   5000 kB\n")
    assert host_memory.available_memory(tmp_path) == 5000 * 1024  # no cgroup
    (group / "memory.current").write_text("3000000\n")
    (group / "memory.stat").write_text("anon 100\ninactive_file 500000\n")
    (group / "memory.max").write_text("max\n")
    assert host_memory.available_memory(tmp_path) == 5000 * 1024
    (group / "memory.max").write_text("4000000\n")
    assert host_memory.available_memory(tmp_path) == 1_500_000
    (group / "memory.max").write_text("2000000\n")
    assert host_memory.available_memory(tmp_path) == 0


def test_progress_is_reported_in_chunks(tmp_path, monkeypatch, pools):
    monkeypatch.setattr("hisparse.worker.host_pool.POPULATE_CHUNK_BYTES", 8192)
    for make in (
        lambda p: HostPool.private(LAYOUT, 20, progress=p),
        lambda p: HostPool.shared(LAYOUT, 20, tmp_path / "hisparse-p.pool", progress=p),
    ):
        seen = []
        pools.append(make(lambda done, total, seen=seen: seen.append((done, total))))
        assert len(seen) == -(-seen[0][1] // 8192) and [d for d, _ in seen] == sorted({d for d, _ in seen})
        assert seen[-1][0] == seen[-1][1] >= pool_bytes(20)


def test_b37_room_is_checked_before_the_file_exists(tmp_path):
    stat = os.statvfs(tmp_path)
    blocks = stat.f_bavail * stat.f_frsize // LAYOUT.host_block_bytes + 100
    path = tmp_path / "hisparse-big.pool"
    with pytest.raises(ConfigError) as error:
        HostPool.shared(LAYOUT, blocks, path)
    text = str(error.value)
    assert "bytes free" in text and str(path) in text and "--shm-size" in text and "lower cache.host_pool_gib" in text
    with pytest.raises(ConfigError, match=r"\(0.00 GiB\) are available; lower cache.host_pool_gib"):
        HostPool.shared(LAYOUT, 6, path, available_bytes=1000)
    assert not list(tmp_path.iterdir())


def test_b37_running_out_of_room_half_way_leaves_no_file(tmp_path, monkeypatch):
    """The check passed, but somebody else took the room: an error with the numbers, never a signal at the first touch."""

    def full(fd, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"hisparse-late.pool needs \d+ bytes .*No space left on device"):
        HostPool.shared(LAYOUT, 6, tmp_path / "hisparse-late.pool")
    assert not list(tmp_path.iterdir())


def test_b37_every_byte_exists_after_creation(tmp_path, pools):
    pools.append(HostPool.shared(LAYOUT, 200, tmp_path / "hisparse-full.pool"))
    assert os.stat(pools[0].path).st_blocks * 512 >= pool_bytes(200)


def test_b37_a_second_start_works_after_kill_and_never_takes_a_live_pool(tmp_path, pools):
    """Owner and ranks are killed; the next start sweeps their file, and leaves those of a live owner and a live rank."""
    code = """
        path = host_memory.pool_path(sys.argv[1], sys.argv[2])
        pool = HostPool.shared(make_layout(), 6, path)
        print(path, flush=True); time.sleep(60)
    """
    joined = "pool = HostPool.attach(make_layout(), 6, sys.argv[1]); print('ready', flush=True); time.sleep(60)"
    dead, orphan, live = (child(code, name, tmp_path) for name in ("dead", "orphan", "live"))
    paths = {p: p.stdout.readline().strip() for p in (dead, orphan, live)}
    assert all(os.path.exists(path) for path in paths.values())
    rank = child(joined, paths[orphan])
    assert rank.stdout.readline() == "ready\n"
    assert host_memory.sweep(tmp_path) == []
    try:
        for process in (dead, orphan):
            process.send_signal(signal.SIGKILL)
            process.wait(10)
        assert [str(p) for p in host_memory.sweep(tmp_path)] == [paths[dead]]
        assert sorted(map(str, tmp_path.iterdir())) == sorted([paths[orphan], paths[live]])
        pools.append(HostPool.shared(LAYOUT, 6, host_memory.pool_path("dead", tmp_path)))
        assert host_memory.sweep(tmp_path) == []
        rank.kill()
        rank.wait(10)
        assert [str(p) for p in host_memory.sweep(tmp_path)] == [paths[orphan]]
    finally:
        for process in (rank, live):
            process.kill()
            process.wait(10)
    assert [str(p) for p in host_memory.sweep(tmp_path)] == [paths[live]]


def test_sweep_knows_owners_by_start_time_and_leaves_other_files(tmp_path):
    mine = host_memory.pool_path("a", tmp_path)
    mine.touch()  # owned by this live process, although nobody holds its lock
    reused = tmp_path / mine.name.replace(f".{host_memory.process_start(os.getpid())}.", ".1.")
    reused.touch()  # our pid, but of an earlier process
    (tmp_path / "hisparse-notes.txt").touch()
    (tmp_path / "other.pool").touch()
    assert host_memory.sweep(tmp_path) == [reused]
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(ConfigError, match="a pool label may hold"):
        host_memory.pool_path("a/b", tmp_path)


def test_the_same_path_twice_is_refused(tmp_path, pools):
    pools.append(HostPool.shared(LAYOUT, 6, tmp_path / "hisparse-a.pool"))
    with pytest.raises(ConfigError, match="File exists"):
        HostPool.shared(LAYOUT, 6, tmp_path / "hisparse-a.pool")
    assert (tmp_path / "hisparse-a.pool").exists()
    with pytest.raises(ConfigError, match="at least 2 pages"):
        HostPool.private(LAYOUT, 1)


def test_b38_map_count_and_memory_stay_bounded(tmp_path):
    def maps():
        with open("/proc/self/maps") as file:
            return sum(1 for _ in file)

    def cycle(i):
        owner = HostPool.shared(LAYOUT, 6, tmp_path / f"hisparse-{i}.pool")
        peer = HostPool.attach(LAYOUT, 6, owner.path)
        peer.rows(0)[7] = 1.0
        peer.close()
        owner.close()
        owner.unlink()

    cycle(0)
    before, files = maps(), len(os.listdir("/proc/self/fd"))
    for i in range(100):
        cycle(i)
    assert maps() <= before + 4 and len(os.listdir("/proc/self/fd")) <= files


def test_b38_a_forked_child_shares_the_private_pool():
    """No copy-on-write: what is pinned for a device stays the parent's memory whoever writes it first."""
    pool = HostPool.private(LAYOUT, 6)
    read, write = os.pipe()
    child_pid = os.fork()
    if child_pid == 0:
        os.read(read, 1)
        os._exit(0 if float(pool.rows(1)[7][0]) == 2.5 else 1)
    pool.rows(1)[7] = 2.5
    os.write(write, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child_pid, 0)[1]) == 0
    os.close(read)
    os.close(write)
    pool.close()


def test_b38_memlock_names_limit_need_and_devices():
    with pytest.raises(
        ConfigError, match=r"for 4 devices needs 4294967296 bytes .*\(1073741824 each\).*RLIMIT_MEMLOCK is 65536"
    ):
        host_memory.check_memlock(1 << 30, 4, 64 << 10)
    host_memory.check_memlock(1 << 30, 4, resource.RLIM_INFINITY)
    host_memory.check_memlock(1 << 30, 4, 4 << 30)


def test_poison_is_nan_in_every_layer():
    pool = HostPool.private(LAYOUT, 6, poison=True)
    assert all(bool(pool.rows(layer).isnan().all()) for layer in range(7)) and not pool.row_masks.any()
    assert torch.equal(torch.isnan(pool.rows(0)).all(1), torch.ones(24, dtype=torch.bool))
    pool.close()
