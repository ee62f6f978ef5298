"""The bench: figures of a whole stack on this machine, each beside a bare Temporal workflow.

    python -m bench [--only ROW[,ROW]] [--quick] [--json FILE] [--list]

It starts a stack of its own as a user would (`perdure dev`), on free ports, with a data folder of its own,
and stops it at the end. It reports; it never fails because something is slow.
"""
