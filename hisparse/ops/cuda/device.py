"""Whether this machine can run the CUDA backend, said before anything is allocated."""

from __future__ import annotations

import torch

from hisparse.errors import ConfigError
from hisparse.ops.cuda.module import nvrtc_version

LEAST_CAPABILITY = (9, 0)
"""Clusters and the instructions that the kernels are written in: Hopper and later."""


def check_device(device: torch.device) -> None:
    """Raises ConfigError, with what to do, unless kernels can be compiled for `device` and run on it."""
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise ConfigError(
            f"model.device = cuda needs compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} (Hopper) or later, "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}; set model.device to cpu"
        )
    nvrtc_version()
