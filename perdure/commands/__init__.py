"""The client commands: `submit`, `get`, `list`, `watch`, `cancel`, over the public API.

    register(app)        adds them to a typer application

Exit codes: 0 done (a watched task COMPLETED), 1 the task FAILED, 2 wrong usage, 3 the task was CANCELLED,
4 the API cannot be reached, 5 the API refused, 130 interrupted (the task goes on).
"""

from perdure.commands.register import register

__all__ = ["register"]
