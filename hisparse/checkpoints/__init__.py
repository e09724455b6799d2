"""Checkpoints that ship inside the package, small enough for a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["measured_recall", "recall_checkpoint"]


def recall_checkpoint() -> Path:
    """Return the directory of the bundled recall checkpoint.

    It is a Hugging Face checkpoint (`GlmMoeDsaForCausalLM`, about 3.6 M parameters, bf16) with its
    tokenizer; the `README.md` beside the weights is its model card. Nothing is loaded here.

    Raises:
        FileNotFoundError: the installation lacks the weights.

    Example:
        >>> recall_checkpoint().name
        'recall'
    """
    directory = Path(__file__).resolve().parent / "recall"
    if not (directory / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"the bundled recall checkpoint is missing: expected model.safetensors in {directory}; "
            "reinstall hisparse with its package data"
        )
    return directory


def measured_recall() -> dict[str, Any]:
    """What the recall checkpoint was measured to answer: `exact_match` by prompt tokens, and date, hardware, command."""
    return dict(json.loads((recall_checkpoint() / "measured.json").read_text()))
