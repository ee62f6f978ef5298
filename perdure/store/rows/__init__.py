"""What the repositories take and give: frozen dataclasses, no session and no lazy loading behind them.

JSON columns are text and stay text here (`params_json`, ...), so that they come back byte for byte; the
properties without `_json` parse them. Times are aware UTC datetimes, durations are seconds.
"""

from perdure.store.rows.callbacks import (
    DeliveryClaim,
    DeliveryRow,
    DeliveryState,
    NewTry,
    OriginRow,
    TryKind,
    TryRow,
    Verdict,
)
from perdure.store.rows.dispatch import (
    DispatchRow,
    Expired,
    Lane,
    Pause,
    Queued,
)
from perdure.store.rows.figures import (
    MissingMark,
    Purged,
    QueueStat,
    SchemaState,
    ServiceTimes,
    UsageRow,
    WorkerReport,
    WorkerRow,
)
from perdure.store.rows.keys import (
    KeyRow,
    NewKey,
    SecretRow,
)
from perdure.store.rows.tasks import (
    ALL_EVENTS,
    CancelResult,
    Changes,
    CreateManyResult,
    CreateResult,
    DeleteResult,
    Idempotency,
    Include,
    NewTask,
    Page,
    Principal,
    PriorityResult,
    TaskFilter,
    TaskRow,
)

__all__ = [
    "ALL_EVENTS",
    "CancelResult",
    "Changes",
    "CreateManyResult",
    "CreateResult",
    "DeleteResult",
    "DeliveryClaim",
    "DeliveryRow",
    "DeliveryState",
    "DispatchRow",
    "Expired",
    "Idempotency",
    "Include",
    "KeyRow",
    "Lane",
    "MissingMark",
    "NewKey",
    "NewTask",
    "NewTry",
    "OriginRow",
    "Page",
    "Pause",
    "Principal",
    "PriorityResult",
    "Purged",
    "QueueStat",
    "Queued",
    "SchemaState",
    "SecretRow",
    "ServiceTimes",
    "TaskFilter",
    "TaskRow",
    "TryKind",
    "TryRow",
    "UsageRow",
    "Verdict",
    "WorkerReport",
    "WorkerRow",
]
