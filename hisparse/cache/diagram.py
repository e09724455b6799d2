"""The table of page states as a Mermaid diagram: `python -m hisparse.cache.diagram` prints what the docs show."""

from __future__ import annotations

from hisparse.cache.residency import TRANSITIONS, PageEvent, PageState


def page_state_diagram() -> str:
    """One edge per pair of states, labelled with its events; NONE is drawn as start and end."""
    edges: dict[tuple[PageState, PageState], list[PageEvent]] = {}
    for (state, event), new in TRANSITIONS.items():
        edges.setdefault((state, new), []).append(event)
    lines = ["stateDiagram-v2"]
    for (state, new), events in edges.items():
        label = ", ".join(event.name.lower() for event in events)
        lines.append(f"    {_node(state)} --> {_node(new)}: {label}")
    return "\n".join(lines) + "\n"


def _node(state: PageState) -> str:
    return "[*]" if state is PageState.NONE else state.name


if __name__ == "__main__":
    print(page_state_diagram(), end="")
