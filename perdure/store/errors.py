"""What a repository raises, and nothing else.

StoreError
├── StoreUnavailable   Postgres cannot be reached, is going down or has no time: answer 503, try again
└── StoreRefused       Postgres refuses this data and always will: NUL, lone surrogate, constraint
    └── InvalidCursor  a list cursor that this list did not make
"""

from __future__ import annotations


class StoreError(Exception):
    """A unit of work failed and left nothing behind, unless the connection broke while it was committing."""


class StoreUnavailable(StoreError):  # noqa: N818 - callers read it as a state of the store
    """Postgres cannot be reached, is going down, or the pool has no connection to give. Try again later."""


class StoreRefused(StoreError):  # noqa: N818 - the verb says who decided
    """The data itself is refused. The same call will be refused again."""


class InvalidCursor(StoreRefused):
    """The cursor is junk, or belongs to another list, filter or user."""
