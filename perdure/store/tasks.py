"""Tasks: the read model of every workflow, and what callers ask of it."""

from __future__ import annotations

from perdure.store.cancel import Changes
from perdure.store.reads import Lists, Reads
from perdure.store.submit import Submits
from perdure.store.watching import Watching
from perdure.store.writes import Writes


class TaskRepository(Submits, Reads, Lists, Watching, Writes, Changes):
    """Every task read, and every write but the dispatcher's and the reconciler's.

    submit.py     create, create_many
    reads.py      get, by_id_any, list, summaries, older_than, count_by_state
    watching.py   changes
    writes.py     project, commit
    cancel.py     request_cancel, cancel_where, set_priority, delete
    """
