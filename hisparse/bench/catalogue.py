"""Which benchmarks there are, and what each needs. Imports none of them: they load torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hisparse.errors import HiSparseError


class Needs(StrEnum):
    """What a benchmark runs on."""

    CPU = "CPU"
    GPU = "GPU"
    SERVICE = "a service"


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One benchmark. `takes`: about how long, at full size on the machine its results come from."""

    needs: Needs
    takes: str
    summary: str


BENCHMARKS: dict[str, Benchmark] = {
    "resolver": Benchmark(needs=Needs.GPU, takes="3 min", summary="Resolve one layer's top-k to rows, misses copied, beside a "
                          "bare look-up and a copy-only launch."),
    "copy": Benchmark(needs=Needs.GPU, takes="1 min", summary="Append with its mirror, spill, restore and scatter, beside the "
                      "copy engine."),
    "attention": Benchmark(needs=Needs.GPU, takes="2 min", summary="Sparse MLA at the real widths, beside a plain gather of "
                           "the same rows."),
    "indexer": Benchmark(needs=Needs.GPU, takes="1 min", summary="Scores and exact top-k, beside reading the keys once."),
    "step": Benchmark(needs=Needs.GPU, takes="2 min", summary="Decode steps of 78 layers, beside the same engine with HiSparse "
                      "off."),
    "import": Benchmark(needs=Needs.CPU, takes="4 min", summary="Prefill/decode imports between two engines over NIXL, beside "
                        "a memcpy."),
    "transport": Benchmark(needs=Needs.CPU, takes="2 min", summary="NIXL READs between two processes, beside a memcpy."),
    "control-plane": Benchmark(needs=Needs.CPU, takes="5 min", summary="Scheduler side at real shapes: steps, admission, "
                               "spills, memory, beside dictionary look-ups."),
    "policy": Benchmark(needs=Needs.CPU, takes="2 min", summary="Rows a hot region misses, beside exact LRU."),
    "serve": Benchmark(needs=Needs.SERVICE, takes="1 min", summary="Load on a running OpenAI-compatible service: TTFT, "
                       "inter-token latency, throughput, beside one client alone."),
}
"""By the name on the command line."""


def why_no_gpu() -> str | None:
    """Why GPU benchmarks cannot run here; None if they can."""
    import torch

    if torch.cuda.is_available():
        return None
    built = "is a CPU build" if torch.version.cuda is None else "sees none (nvidia-smi says why)"
    return f"torch {torch.__version__} {built}"


def need_gpu(name: str) -> None:
    """Raises HiSparseError, with what does run here, unless there is a CUDA device."""
    reason = why_no_gpu()
    if reason is not None:
        here = ", ".join(other for other, found in BENCHMARKS.items() if found.needs is not Needs.GPU)
        raise HiSparseError(f"bench {name} needs a CUDA device: {reason}; without a GPU there are {here}")
