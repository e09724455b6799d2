"""The page docs/configuration.md, written from the options themselves: `hisparse config reference`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hisparse.config.effects import RULES
from hisparse.config.options import Option, options, sections
from hisparse.config.sections import HiSparseConfig
from hisparse.config.spellings import SPELLINGS

HEAD = """# Configuration

Written by `hisparse config reference`; do not edit it here, a test compares the two.

One object configures a service: `hisparse serve CONFIG.yaml`, the `args` of an application in a Ray Serve file, or
`load_config` in Python. `hisparse serve CONFIG.yaml --dry-run` prints what every option resolves to, and the memory it takes.

```yaml
model:
  path: /models/glm-5.2
cache:
  host_pool_gib: 64
prefill:            # what differs on prefill engines
  cache:
    device_blocks: 4096
```

Later ones win:
1. the file;
2. variables of the environment, `HISPARSE_SECTION__OPTION`; the value is YAML, so lists are written `[128, 256]`;
3. `--set section.option=value`, or keywords.

A mistake ends the start with one line for each: path, line of the file, limit, what was given, and what may have been meant. An
option that was set and does nothing is warned about.

*For each* says for what a value counts: a request; a rank (one GPU or process of an engine); a replica (one engine with all its
ranks, and the host pool they share); a node; or the service. Memory of a node is the sum over the replicas on it.
"""


def page() -> str:
    """The whole page as Markdown."""
    return "\n".join([HEAD, *_sections(), *_spellings(), *_effects()]).rstrip() + "\n"


def _sections() -> Iterator[str]:
    described = {name: (found.__doc__ or "").strip() for name, found in sections().items()}
    for name in ["", *described]:
        inside = [option for option in options().values() if option.section == name]
        yield f"## {f'`{name}`' if name else 'At the top'}"
        yield f"{described[name] if name else (HiSparseConfig.__doc__ or '').strip()}\n"
        yield from _table(("option, variable", "value", "default", "unit", "for each", "meaning"), map(_row, inside))


def _row(option: Option) -> tuple[str, ...]:
    value = option.kind + (f", {option.limits}" if option.limits else "")
    default = option.default if option.default == "required" else f"`{option.default}`"
    return (f"`{option.name}`<br>`{option.variable}`", value, default, option.unit, option.scope,
            option.description)


def _spellings() -> Iterator[str]:
    yield "## Other spellings"
    yield "Names from other engines, accepted in `cache` and at the top; together with ours they are refused.\n"
    yield from _table(("name", "means", ""), (
        (f"`{name}`", f"`{found.option}`" if found.option else "nothing", found.text) for name, found in SPELLINGS.items()))


def _effects() -> Iterator[str]:
    yield "## Options without effect"
    yield "Warned about when they are set to something else than their default.\n"
    yield from _table(("when", "these do nothing"), (
        (why, ", ".join(f"`{path}`" for path in paths)) for paths, _, why in RULES))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    head = list(head)
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""
