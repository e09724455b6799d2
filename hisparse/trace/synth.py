"""Traces from the generator of `hisparse.trace.selection`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hisparse.errors import ConfigError
from hisparse.trace.selection import Order, SelectionModel
from hisparse.trace.trace_file import Series, Trace


def synthesise(models: Mapping[str, SelectionModel], *, num_steps: int, seed: int, order: Order = Order.ASCENDING) -> Trace:
    """One series for each model, by name; the same for the same arguments, and each another draw.

    Raises:
        ConfigError: fewer than one step.
    """
    if num_steps < 1:
        raise ConfigError(f"a trace needs at least 1 step, got {num_steps}")
    series = []
    for i, (name, model) in enumerate(models.items()):
        own = int(np.random.SeedSequence([seed, i]).generate_state(1)[0])
        series.append(Series(name=name, steps=tuple(model.steps(num_steps, seed=own, order=order)),
                             lengths=tuple(model.length(step) for step in range(num_steps))))
    facts = "; ".join(f"{name}: pool {m.pool}, skew {m.skew}, drift {m.drift}, recent {m.recent}, top_k {m.top_k}, context "
                      f"{m.context}, shift {m.shift}, persistence {m.persistence}" for name, m in models.items())
    return Trace(series=tuple(series), source=f"hisparse trace synth, seed {seed}, order {order.value}: {facts}")
