"""Names under which users of other engines know our options. Accepted in the section `cache` and at the top."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hisparse.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """One of them.

    Attributes:
        option: of the section `cache` that it means; None = it has no effect here. text: for the reference page.
        refused: why this value cannot be honoured; None = it can.
    """

    option: str | None
    text: str
    refused: Callable[[Any], str | None] = lambda value: None


def _not_lazy(value: Any) -> str | None:
    if value is True:
        return None
    return "rows are always written through to the host page behind them, there is no lazy mode; remove it or set it to true"


SPELLINGS: dict[str, Spelling] = {
    "host_pool_gib": Spelling(option="cache.host_pool_gib", text="The same name; also accepted at the top."),
    "host_to_device_ratio": Spelling(option="cache.host_to_device_ratio", text="The same meaning; also accepted at the top."),
    "device_buffer_size": Spelling(option="cache.hot_rows", text="Rows of a request's hot region."),
    "eager_host_mirror": Spelling(option=None, refused=_not_lazy, text="`true` is how it always is here; `false` is refused."),
    "top_k": Spelling(option=None, text="The checkpoint's `index_topk` counts."),
    "swap_in_block_size": Spelling(option=None, text="A launch size; kernels here choose theirs."),
}


def translate(data: dict[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """`data` of one source in our spellings. `tell` hears of each key without effect.

    Raises:
        ConfigError: a key beside another that means the same, or a value that cannot be honoured.
    """
    cache = data.get("cache", {})
    if not isinstance(cache, dict):
        return data
    own = {name: value for name, value in cache.items() if name not in SPELLINGS or SPELLINGS[name].option == f"cache.{name}"}
    foreign = {f"cache.{name}": value for name, value in cache.items() if name not in own}
    foreign |= {name: value for name, value in data.items() if name in SPELLINGS}
    for path, value in foreign.items():
        spelling = SPELLINGS[path.removeprefix("cache.")]
        if (reason := spelling.refused(value)) is not None:
            raise ConfigError(f"{path} = {value!r}: {reason}")
        if spelling.option is None:
            tell(f"{path} = {value!r} has no effect: {spelling.text}")
            continue
        name = spelling.option.removeprefix("cache.")
        if name in own:
            raise ConfigError(f"{path} and {spelling.option} mean the same; remove one of them")
        own[name] = value
    out = {name: value for name, value in data.items() if name not in SPELLINGS}
    if own or "cache" in data:
        out["cache"] = own
    if isinstance(data.get("prefill"), dict):
        out["prefill"] = translate(data["prefill"], tell)
    return out
