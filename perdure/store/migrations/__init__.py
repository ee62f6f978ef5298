"""The schema, revision by revision. Names sort in order, so that a newer schema can be told from an older.

Expand, then contract: a revision only adds, so that the code of the release before still works on it; what is
no longer read is dropped one release later.
"""

from typing import Final

NEWEST: Final = "0003"  # the revision that this code expects; a test compares it with the files
