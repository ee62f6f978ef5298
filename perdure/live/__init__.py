"""Watching tasks: live progress, waiting, event streams."""
