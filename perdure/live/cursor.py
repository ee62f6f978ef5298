"""Where a watcher stands in a task's story, and the event id that says so.

An id is opaque to clients: `<stage>-<change>-<seq>-<offset>-<crc>.<tag>`. It holds all that any API process
needs to go on from there: no process keeps anything for a watcher that left.

stage    number of the move: PENDING 0, QUEUED 1, PROCESSING 2 (attempt 1), QUEUED 3, ...; the final one last
change   the row's change number: what else changed within the stage (a cancel request, a priority)
seq      PROCESSING: the beat within the attempt; waiting: how long, in steps of WAIT_STEP seconds
offset   characters (code points) of the text that were sent, and the CRC-32 of them
tag      ties the id to its task, so that junk and another task's id are known for what they are
"""

from __future__ import annotations

import re
import zlib
from typing import Final, NamedTuple, Self

FINAL_STAGE: Final = 1_000_000
_ID: Final = re.compile(
    r"([0-9]{1,7})-([0-9]{1,19})-([0-9]{1,15})-([0-9]{1,9})-([0-9a-f]{1,8})\.([0-9a-f]{8})\Z", re.ASCII
)


class Cursor(NamedTuple):
    """A place in the story. Ordered: a later event of the same task has a greater cursor."""

    stage: int
    change: int = 0
    seq: int = 0
    offset: int = 0
    crc: int = 0

    @property
    def final(self) -> bool:
        return self.stage == FINAL_STAGE

    def event_id(self, task_id: str) -> str:
        """The SSE id of the event that ends here."""
        body = f"{self.stage}-{self.change}-{self.seq}-{self.offset}-{self.crc:x}"
        return f"{body}.{_tag(task_id, body)}"

    @classmethod
    def parse(cls, task_id: str, event_id: str | None) -> Self | None:
        """The cursor of an id of this task; None for anything else. Never raises."""
        match = _ID.match(event_id) if event_id else None
        if match is None or _tag(task_id, match.string.rpartition(".")[0]) != match[6]:
            return None
        stage, change, seq, offset = (int(part) for part in match.groups()[:4])
        return cls(stage, change, seq, offset, int(match[5], 16))


FINAL_CURSOR: Final = Cursor(FINAL_STAGE)  # the same on every read, whatever was sent before it


def text_crc(text: str, before: int = 0) -> int:
    """CRC-32 of a text's UTF-8, going on from `before`."""
    return zlib.crc32(text.encode("utf-8", "replace"), before)


def _tag(task_id: str, body: str) -> str:
    """Not a secret: who makes up an id deceives only himself."""
    return f"{zlib.crc32(body.encode(), zlib.crc32(task_id.encode())):08x}"
