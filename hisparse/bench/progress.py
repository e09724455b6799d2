"""What a benchmark tells while it runs."""

from __future__ import annotations

import sys


class Progress:
    """Writes one line to stderr for each finished step; a command line on a terminal shows a bar instead."""

    def expect(self, steps: int) -> None:
        """So many steps are to come."""

    def step(self, text: str) -> None:
        """One of them is done."""
        print(text, file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Something worth a line that is no step."""
        print(text, file=sys.stderr, flush=True)
