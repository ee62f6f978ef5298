"""List cursors: where a page ended, bound to its list. They hold a time and an id of the caller's own row."""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from datetime import UTC, datetime, timedelta
from typing import Final

from perdure.names import is_task_id
from perdure.store.errors import InvalidCursor
from perdure.store.jsontext import to_json
from perdure.store.rows import TaskFilter, TaskRow

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_HEAD: Final = struct.Struct(">Bq8s")  # version, microseconds since 1970, hash of list and filter
_MAX: Final = 256


def encode_cursor(last: TaskRow, filter: TaskFilter, user: str | None) -> str:
    """The cursor after `last` in the list of `user` (None: everybody's)."""
    at = (last.created_at - _EPOCH) // _MICROSECOND
    raw = _HEAD.pack(1, at, _bind(filter, user)) + last.task_id.encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def decode_cursor(text: str, filter: TaskFilter, user: str | None) -> tuple[datetime, str]:
    """Creation time and id of the last row. Raises InvalidCursor for junk and for another list's cursor."""
    try:
        if len(text) > _MAX:
            raise InvalidCursor("the cursor is too long")
        padded = text.encode("ascii") + b"=" * (-len(text) % 4)
        raw = base64.b64decode(padded, altchars=b"-_", validate=True)
        version, micros, bound = _HEAD.unpack_from(raw)
        task_id = raw[_HEAD.size :].decode("ascii")
        at = _EPOCH + micros * _MICROSECOND
    except (UnicodeError, binascii.Error, struct.error, OverflowError) as error:
        raise InvalidCursor("the cursor is none of ours") from error
    if version != 1 or not is_task_id(task_id):
        raise InvalidCursor("the cursor is none of ours")
    if bound != _bind(filter, user):
        raise InvalidCursor("the cursor belongs to another list or filter")
    return at, task_id


def _bind(filter: TaskFilter, user: str | None) -> bytes:
    parts = [
        user,
        sorted(filter.statuses),
        filter.model_id,
        filter.task_type,
        filter.priority,
        filter.created_after,
        filter.created_before,
        sorted(filter.metadata),
    ]
    return hashlib.sha256(to_json(parts).encode()).digest()[:8]
