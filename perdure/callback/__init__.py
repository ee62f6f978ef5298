"""Callbacks: building, signing and sending them, and `verify` for those who receive them."""

from perdure.callback.verify import InvalidSignature, verify

__all__ = ["InvalidSignature", "verify"]
