"""The device that a rank computes on: chosen, checked and set up once, before anything is allocated."""

from __future__ import annotations

import torch

from hisparse.config import GIB, ModelConfig
from hisparse.errors import ConfigError
from hisparse.ops import backend


def open_device(config: ModelConfig, rank: int = 0) -> torch.device:
    """The rank's device, made this thread's current one, with arithmetic as parity needs it: float32 products in float32
    (never TF32), sums of bfloat16 products in float32.

    A rank that sees several GPUs takes the one of its number; a rank that sees one (as Ray arranges it) takes that.
    Raises:
        ConfigError: `model.device` cannot be used on this machine, and what would help.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch {torch.__version__} sees no CUDA device" if built else f"torch {torch.__version__} is built without CUDA"
        raise ConfigError(f"model.device = cuda, but {why}; check nvidia-smi and the torch wheel, or set model.device to cpu")
    count = torch.cuda.device_count()
    device = torch.device("cuda", rank if count > 1 else 0)
    if rank >= count > 1:
        raise ConfigError(f"rank {rank} needs a GPU of its own, this process sees {count}; lower tensor_parallel_size")
    torch.cuda.set_device(device)
    backend(device)  # first: says which package is missing
    from hisparse.ops.cuda.device import check_device

    check_device(device)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return device


def check_devices(config: ModelConfig, num_ranks: int) -> None:
    """For ranks that this process starts itself. Raises ConfigError unless each can have a GPU of its own."""
    if config.device == "cuda" and num_ranks > 1 and torch.cuda.device_count() < num_ranks:
        raise ConfigError(f"tensor_parallel_size = {num_ranks} needs as many GPUs, this process sees "
                          f"{torch.cuda.device_count()}; lower it, or set model.device to cpu")


def check_room(device: torch.device, num_bytes: int, num_blocks: int) -> None:
    """Raises ConfigError unless a device pool of `num_bytes` fits beside the weights; says how many blocks would."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if num_bytes > free:
        raise ConfigError(
            f"cache.device_blocks = {num_blocks} needs {num_bytes / GIB:.2f} GiB, but {free / GIB:.2f} of {total / GIB:.2f} "
            f"GiB of {torch.cuda.get_device_name(device)} are free beside the weights; lower it below "
            f"{num_blocks * free // num_bytes} (attention and graphs need room, too)"
        )
