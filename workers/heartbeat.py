"""How often a worker tells the server that it lives: the roll call reads it there."""

from datetime import timedelta
from typing import Final

HEARTBEAT: Final = timedelta(seconds=5)
