"""The seams of `transformers` that the hooks hang on: checked when a model is loaded, by name and signature."""

from __future__ import annotations

import inspect
from typing import Any

import transformers

from hisparse.errors import ConfigError

SUPPORTED = "transformers>=5.18,<6"


def seam_error(what: str) -> ConfigError:
    """The error for a seam that is not as expected."""
    return ConfigError(f"transformers {transformers.__version__} does not fit hisparse: {what}; install {SUPPORTED}")


def check_seams(model: Any) -> None:
    """Raises ConfigError, naming the version, unless every seam exists on this model with the expected signature."""
    from transformers import AttentionInterface
    from transformers.cache_utils import Cache

    for name, leading in (("update", 3), ("update_indexer", 2)):
        _positional(getattr(Cache, name, None), f"Cache.{name}", leading + 1)
    if "layers" not in inspect.signature(Cache.__init__).parameters:
        raise seam_error("Cache() takes no `layers`")
    if not callable(getattr(AttentionInterface, "register", None)):
        raise seam_error("AttentionInterface.register does not exist")
    for i, layer in enumerate(attention_layers(model)):
        _positional(getattr(type(layer), "expand_kv", None), f"layer {i}: {type(layer).__name__}.expand_kv", 3)
        for name in ("kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "layer_idx"):
            if not hasattr(layer, name):
                raise seam_error(f"layer {i}: {type(layer).__name__} has no {name}")
    cache_argument(model)


def attention_layers(model: Any) -> list[Any]:
    """The attention module of every decoder layer, in order."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None or not all(hasattr(layer, "self_attn") for layer in layers):
        raise seam_error(f"{type(model).__name__} has no model.layers[i].self_attn")
    return [layer.self_attn for layer in layers]


def cache_argument(model: Any) -> str:
    """The name under which the decoder's forward takes its cache: `cache` since 5.24, `past_key_values` before."""
    forward = inspect.unwrap(type(model.model).forward)
    for name in ("cache", "past_key_values"):
        if name in inspect.signature(forward).parameters:
            return name
    raise seam_error(f"{type(model.model).__name__}.forward takes neither `cache` nor `past_key_values`")


def _positional(function: Any, name: str, count: int) -> None:
    """`function` takes at least `count` positional parameters, `self` included."""
    if not callable(function):
        raise seam_error(f"{name} does not exist")
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    if sum(parameter.kind in kinds for parameter in parameters) < count:
        raise seam_error(f"{name} takes {inspect.signature(function)}, expected {count - 1} positional arguments")
