"""Content encodings of a response, inflated in bounded pieces.

We ask for `identity`; a proxy may compress all the same. Small compressed bytes can be very large plain ones,
so a piece never exceeds `_PIECE` and whoever reads applies its limit between pieces.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final, Protocol

_PIECE: Final = 64 * 1024
_ANY_WRAPPER: Final = 32 + zlib.MAX_WBITS  # gzip or zlib, told apart by the header


class EncodingError(Exception):
    """The encoding is unknown, or the compressed bytes are broken; the message says which."""


class Inflater(Protocol):
    """Turns the body's bytes into plain ones."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Plain pieces of at most 64 KiB (`identity` passes what it gets). Raises EncodingError."""
        ...


class Identity:
    """No encoding."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        yield data


class Zlib:
    """gzip and deflate (in its zlib wrapper), several members in a row included."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(_ANY_WRAPPER)

    def feed(self, data: bytes) -> Iterator[bytes]:
        try:
            while data:
                if self._inflate.eof:  # another member follows
                    self._inflate = zlib.decompressobj(_ANY_WRAPPER)
                piece = self._inflate.decompress(data, _PIECE)
                data = self._inflate.unconsumed_tail or self._inflate.unused_data
                if piece:
                    yield piece
        except zlib.error as error:
            raise EncodingError("its compressed body is broken") from error


def inflater(content_encoding: str) -> Inflater:
    """The inflater of a Content-Encoding header's value. Raises EncodingError for one we don't know."""
    names = {name.strip().lower() for name in content_encoding.split(",")} - {"", "identity"}
    if not names:
        return Identity()
    if len(names) == 1 and names <= {"gzip", "x-gzip", "deflate"}:
        return Zlib()
    raise EncodingError(f"it answers in the encoding '{content_encoding[:40]}', which was not asked for")
