"""A block of free ports for a whole stack."""

from __future__ import annotations

import random
from typing import Final

from perdure.embedded.plan import Ports
from perdure.embedded.ports import is_free

# Below the ports that the kernel gives to outgoing connections, and a hundred apart.
_FIRST: Final = 20_000
_LAST: Final = 31_000


def free_port_base(workers: int = 10) -> int:
    """A --port-base of which every port is free now. Raises RuntimeError when there is none."""
    for _ in range(200):
        base = random.randrange(_FIRST, _LAST, 100)
        if all(map(is_free, Ports.of(base).used(model=True, workers=workers).values())):
            return base
    raise RuntimeError(f"no free block of ports between {_FIRST} and {_LAST}")
