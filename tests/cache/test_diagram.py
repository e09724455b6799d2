"""The diagram in the docs is the one drawn from the table."""

from __future__ import annotations

import re
from pathlib import Path

from hisparse.cache.diagram import page_state_diagram
from hisparse.cache.residency import TRANSITIONS

DOCS = Path(__file__).parents[2] / "docs" / "control-plane.md"


def test_the_docs_show_the_table() -> None:
    (shown,) = re.findall(r"```mermaid\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    assert shown == page_state_diagram(), "run python -m hisparse.cache.diagram and paste its output"


def test_every_transition_is_drawn_once() -> None:
    edges = re.findall(r"(\S+) --> (\S+): (.*)", page_state_diagram())
    drawn = {(state, event, new) for state, new, events in edges for event in events.split(", ")}
    node = {"NONE": "[*]"}
    assert drawn == {(node.get(state.name, state.name), event.name.lower(), node.get(new.name, new.name))
                     for (state, event), new in TRANSITIONS.items()}
    assert len(edges) == len({(state, new) for state, new, _ in edges})
