"""A small client of the public API, for terminals, scripts and tests.

    async with Client() as perdure:                      PERDURE_URL, PERDURE_API_KEY
        task = await perdure.submit({"model_id": "m", "params": {"messages": [...]}})
        async for event in perdure.watch(task["task_id"], partial=True):
            print(event.data["status"], event.data["progress"])

ClientError
├── Unreachable       the API did not answer in time
└── ApiRefused        it answered with a problem: `status`, `code`, `detail`

A submit carries an Idempotency-Key, so that it can be sent again after a broken connection. A watch that
breaks goes on where it stopped, on whichever API process answers next.
"""

from perdure.client.errors import ApiRefused, ClientError, Unreachable
from perdure.client.frames import FINAL_STATES, Event, Task
from perdure.client.http import DEFAULT_URL, Client

__all__ = [
    "DEFAULT_URL",
    "FINAL_STATES",
    "ApiRefused",
    "Client",
    "ClientError",
    "Event",
    "Task",
    "Unreachable",
]
