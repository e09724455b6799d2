"""The Triton kernels without a GPU: run by Triton's interpreter, compiled for Hopper, planned for every batch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hisparse.errors import ConfigError
from hisparse.ops.cuda import attention, attention_cluster, attention_kernels
from hisparse.ops.sources import kernel_sources
from tests.ops.mla_cases import Case, make

H200 = (9, 132)
HOPPER_SHARED_BYTES = 227 << 10
LAUNCH = attention.Launch(splits=1, per_split=1 << 20, block_h=16, block_n=16, warps=4)
# Interpreted: float32 rows only, for Triton's interpreter multiplies no bfloat16.
INTERPRETED = [
    (Case(), None),
    (Case(n=2, heads=5, k=70, host=True, row_delta=3), None),
    (Case(n=2, heads=20, k=50, id_dtype=torch.int64), None),
    (Case(n=3, k=64, masked=0.0), replace(LAUNCH, splits=2, per_split=32)),
    (Case(n=3, k=50, masked=0.9), replace(LAUNCH, splits=4, per_split=16)),
    (Case(n=2, k=33, latent=48, rope=24, host=True), replace(LAUNCH, splits=3, per_split=16)),
    (Case(n=2, k=1, masked=0.0), None),
    (Case(n=2, k=40, q_dtype=torch.bfloat16), replace(LAUNCH, splits=3, per_split=16)),
]


def run_interpreted() -> list[dict[str, float]]:
    from tests.ops.mla_cases import error, exact

    found = []
    for case, launch in INTERPRETED:
        inputs = make(case)
        out = torch.full((case.n, case.heads, case.latent), float("nan"), dtype=case.q_dtype)
        got, gathered = inputs.call(attention, launch=launch, out=out)
        wanted = -1 if inputs.host_ids is None else int((inputs.host_ids >= 0).sum())
        found.append({"error": error(got, exact(inputs)), "same": got is out, "empty": float(got[0].abs().max()),
                      "gathered": -1 if gathered is None else int(gathered.sum()), "wanted": wanted})
    return found


@pytest.fixture(scope="module")
def interpreted() -> list[dict[str, float]]:
    """In a process of its own: the interpreter is chosen when a kernel is defined."""
    code = ("import tests.ops.interpreted, json; from tests.ops import test_attention_triton as t; "
            "print('found', json.dumps(t.run_interpreted()))")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    found: list[dict[str, float]] = json.loads(run.stdout.split("found", 1)[1])
    return found


@pytest.mark.parametrize("index", range(len(INTERPRETED)))
def test_interpreted_kernels_equal_float64(interpreted, index):
    """Every row that no entry names is NaN; row 0 of each case has no entry at all."""
    case, found = INTERPRETED[index][0], interpreted[index]
    # the interpreter cuts bfloat16 results off instead of rounding them
    assert found["error"] < (1e-6 if case.q_dtype == torch.float32 else 8e-3), case
    assert found["same"] and found["empty"] == 0 and found["gathered"] == found["wanted"]


def signature(kernel, pointers: dict[str, str], constants: dict[str, object]):
    """(signature, constants, attributes) for a compilation without arguments, aligned as real ones are."""
    names = kernel.arg_names
    types = {name: pointers.get(name, "constexpr" if name in constants else "fp32" if name == "scale2" else "i32")
             for name in names}
    aligned = [name for name in names if name in pointers or "stride" in name or name == "heads"]
    return types, {(names.index(name),): value for name, value in constants.items()}, {
        (names.index(name),): [["tt.divisibility", 16]] for name in aligned}


@pytest.mark.parametrize(("row_dtype", "heads", "latent", "rope"), [
    (torch.float32, 4, 64, 16), (torch.float32, 64, 512, 64), (torch.bfloat16, 16, 512, 64), (torch.bfloat16, 4, 64, 16),
    (torch.uint8, 16, 512, 64), (torch.uint8, 64, 512, 64), (torch.uint8, 4, 128, 16),
])
@pytest.mark.parametrize("major", [90, 100])
def test_the_general_kernel_compiles(row_dtype, heads, latent, rope, major):
    launch = attention.plan_launch(4, heads, 2048, row_dtype, latent, rope, (major // 10, 132), aligned=False)
    assert not launch.cluster
    rows = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.uint8: "*u8"}[row_dtype]
    width = latent + 16 + 2 * rope if row_dtype == torch.uint8 else latent + rope
    pointers = {"q": "*bf16", "rows": rows, "host": rows, "ids": "*i32", "host_ids": "*i32", "out": "*fp32",
                "part_lse": "*fp32"}
    constants = {"IS_SPLIT": True, "LATENT": latent, "ROPE": rope, "LATENT_P": latent, "ROPE_P": rope, "ROW": width,
                 "FORMAT": {"*fp32": 0, "*bf16": 1, "*u8": 2}[rows], "HAS_HOST": True, "PDL": True, "BLOCK_H": launch.block_h,
                 "BLOCK_N": launch.block_n, "STAGES": launch.stages}
    kernel = attention_kernels.attend_rows
    compiled = triton.compile(ASTSource(kernel, *signature(kernel, pointers, constants)),
                              target=GPUTarget("cuda", major, 32), options={"num_warps": launch.warps})
    assert compiled.metadata.shared <= HOPPER_SHARED_BYTES


@pytest.mark.parametrize(("heads", "row_dtype"), product([4, 16, 64, 128], [torch.float32, torch.bfloat16, torch.uint8]))
def test_plans_cover_every_entry_and_fill_the_gpu(heads, row_dtype):
    for num, k in product([1, 2, 5, 16, 64, 100, 128, 512, 4096], [1, 32, 63, 64, 65, 1000, 2048]):
        plan = attention.plan_launch(num, heads, k, row_dtype, 512, 64, H200, aligned=False)
        assert not plan.cluster and plan.per_split % plan.block_n == 0
        assert (plan.splits - 1) * plan.per_split < k <= plan.splits * plan.per_split
        cluster = attention.plan_launch(num, heads, k, row_dtype, 512, 64, H200).cluster
        assert cluster in attention_cluster.RESIDENT if cluster else row_dtype == torch.float32 or heads <= 16
        assert cluster <= 1 or 64 * (cluster - 1) < k
    for aligned in (False, True):
        assert attention.plan_launch(1, heads, 2048, row_dtype, 512, 64, H200, aligned).splits >= 16
        assert attention.plan_launch(4096, heads, 2048, row_dtype, 512, 64, H200, aligned).splits == 1


@pytest.mark.parametrize(("num", "heads", "want"), [
    (1, 64, (16, 16)), (1, 128, (16, 32)), (4, 64, (16, 64)), (4, 128, (8, 64)), (16, 64, (6, 64)), (128, 64, (1, 64)),
])
def test_few_query_rows_are_cut_into_small_blocks_of_heads(num, heads, want):
    assert attention_cluster.plan_cluster(num, heads, 2048, 132) == want and want in attention_cluster.SHAPES
    assert attention.plan_launch(num, heads, 2048, torch.uint8, 512, 64, H200).block_h == want[1]


def test_other_widths_and_gpus_get_the_triton_kernel():
    assert attention.plan_launch(16, 64, 2048, torch.bfloat16, 512, 64, H200).cluster
    for latent, rope, device in ((256, 64, H200), (512, 32, H200), (512, 64, (10, 148)), (512, 64, (8, 108))):
        assert not attention.plan_launch(16, 64, 2048, torch.bfloat16, latent, rope, device).cluster


@pytest.mark.parametrize("change", [
    {"q_dtype": torch.float16}, {"rows": "transposed"}, {"ids": torch.int16}, {"latent": 80}, {"host": "rows only"},
    {"out": "wrong"}, {"rows": "bytes"}, {"rows": "unaligned"},
])
def test_what_does_not_fit_is_refused(change):
    inputs = make(Case())
    q, rows, ids, latent, more = inputs.q, inputs.rows, inputs.ids, 64, {}
    if "q_dtype" in change:
        q = q.to(change["q_dtype"])
    if "ids" in change:
        ids = ids.to(change["ids"])
    rows = {"transposed": rows.T, "bytes": rows.view(torch.uint8), "unaligned": rows.flatten()[1:-79].view(-1, 80)}.get(
        change.get("rows", ""), rows)
    latent = change.get("latent", latent)
    if "host" in change:
        more["host_rows"] = rows
    if "out" in change:
        more["out"] = torch.empty(3, 4, 63)
    with pytest.raises(ConfigError):
        attention.sparse_mla(q, rows, ids, 1.0, latent, **more)


def test_what_the_cluster_kernel_reads():
    """Queries and outputs whose heads start on 16 bytes; a Triton kernel takes the rest."""
    wide = torch.empty(3, 64, 600, dtype=torch.bfloat16)
    rows, out = torch.empty(10, 576, dtype=torch.bfloat16), torch.empty(3, 64, 512, dtype=torch.bfloat16)
    assert attention_cluster.suits(wide[..., :576], rows, out) and attention_cluster.suits(wide[..., 8:584], rows, out)
    assert attention_cluster.suits(wide[..., 4:580].float(), rows, out.float())
    assert not attention_cluster.suits(wide[..., 4:580], rows, out)
    assert not attention_cluster.suits(wide[..., :576], rows.float(), out)
    odd = torch.empty(3, 64, 514, dtype=torch.bfloat16)[..., :512]
    assert not attention_cluster.suits(wide[..., :576], rows, odd)


def test_no_rows_and_no_entries():
    inputs = make(Case())
    assert attention.sparse_mla(inputs.q[:0], inputs.rows, inputs.ids[:0], 1.0, 64)[0].shape == (0, 4, 64)
    assert bool((attention.sparse_mla(inputs.q, inputs.rows, inputs.ids[:, :0], 1.0, 64)[0] == 0).all())


@pytest.mark.parametrize("host", [False, True])
def test_a_launch_has_the_arguments_that_the_source_takes(host, monkeypatch):
    """In number, kind and order of pointers and numbers; a driver would pack them as they come."""
    launches = []
    monkeypatch.setattr(attention_cluster, "_loaded", lambda *shape: (lambda *launch: launches.append(launch), *shape[:2]))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    q, rows = torch.empty(3, 64, 576, dtype=torch.bfloat16), torch.empty(10, 576, dtype=torch.bfloat16)
    ids, out = torch.zeros(3, 40, dtype=torch.int32), torch.empty(3, 64, 512, dtype=torch.bfloat16)
    attention_cluster.attend(q, rows, ids, 0.1, 5, rows if host else None, ids if host else None, out, 2)
    (grid, threads, args, shared), = launches
    source = (kernel_sources() / "attention.cu").read_text()
    declared = re.search(r"sparse_mla\((.*?)\)", source, re.DOTALL).group(1).replace("const ", "").split(",")
    kinds = ["pointer" if "*" in one else one.split()[0] for one in declared]
    given = ["pointer" if arg is None or isinstance(arg, torch.Tensor) else "float" if isinstance(arg, float) else "i64"
             for arg in args]
    assert given == kinds and len(grid) == 1 and grid[0] == 6
    assert int(re.search(r"THREADS = (\d+)", (kernel_sources() / "attention_shape.cuh").read_text()).group(1)) == threads
    assert shared <= HOPPER_SHARED_BYTES
