"""Where a watcher of many tasks stands, and the event id that says so.

An id is opaque to clients: `<change>-<told>-<upto>[-<beat>].<tag>`. The two snapshots say exactly what was
told: all that `told` sees, and of what `upto` sees all up to `change`.
"""

from __future__ import annotations

import re
import zlib
from typing import Final, NamedTuple, Self

from perdure.store.news import Snapshot

_MAX: Final = 16_384  # characters: a snapshot names the transactions that were running
_ID: Final = re.compile(r"([0-9]{1,19})-([0-9_]*)-([0-9_]*)(?:-[0-9a-f_]+)?\.([0-9a-f]{8})\Z", re.ASCII)


class Mark(NamedTuple):
    """A place in the changes of a caller's tasks. `told` None: the first look, at all that is not final."""

    told: Snapshot | None = None
    upto: Snapshot | None = None
    after: int = 0

    def event_id(self, user_id: str, beat: str = "") -> str:
        """The SSE id of the event that ends here; `beat` tells apart what moves nothing on."""
        body = f"{self.after}-{_short(self.told)}-{_short(self.upto)}" + (f"-{beat}" if beat else "")
        return f"{body}.{_tag(user_id, body)}"

    @classmethod
    def parse(cls, user_id: str, event_id: str | None) -> Self | None:
        """The mark of an id of this user's; None for anything else. Never raises."""
        match = _ID.match(event_id) if event_id and len(event_id) <= _MAX else None
        if match is None or _tag(user_id, match.string.rpartition(".")[0]) != match[4]:
            return None
        try:
            return cls(_long(match[2]), _long(match[3]), int(match[1]))
        except ValueError:
            return None


def _short(snapshot: Snapshot | None) -> str:
    """A snapshot in few digits: all its numbers but the first as distances from it."""
    if snapshot is None:
        return ""
    running = sorted(xid - snapshot.xmin for xid in snapshot.running)
    return "_".join(map(str, (snapshot.xmin, snapshot.xmax - snapshot.xmin, *running)))


def _long(text: str) -> Snapshot | None:
    if not text:
        return None
    xmin, width, *running = (int(part) for part in text.split("_"))
    return Snapshot(xmin, xmin + width, frozenset(xmin + part for part in running))


def _tag(user_id: str, body: str) -> str:
    """Not a secret: who makes up an id deceives only himself."""
    return f"{zlib.crc32(body.encode(), zlib.crc32(user_id.encode())):08x}"
