"""Becomes another program that ends when its parent does: `leash.py PARENT_PID COMMAND...`.

Runs by path and without site packages, so that it costs little; the process id stays the same. On Linux the
kernel sends SIGTERM when the parent goes, however it goes. Elsewhere the next start of the stack clears up.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it went before the leash was on
            sys.exit(1)
    os.execv(command[0], command)  # noqa: S606 - the whole purpose; no shell, arguments of our own


if __name__ == "__main__":
    main()
