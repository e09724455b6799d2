"""What the parts of a `World` use of each other."""

from __future__ import annotations

import random
from collections import Counter

from hisparse.engine.load_failures import LoadFailurePolicy
from hisparse.types import RequestPages
from tests.pd.decode import Decode
from tests.pd.requests import Request


class WorldPart:
    """Attributes of `World`, which says what they are."""

    rng: random.Random
    met: Counter[str]
    decode: Decode
    requests: dict[str, Request]
    zombies: dict[str, RequestPages]
    failures: LoadFailurePolicy
    incarnations: dict[str, str]
    retired: dict[tuple[str, str], float]
    asks: int
