"""JSON as text for rows: what goes in comes out, digit for digit."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from perdure.store.errors import StoreRefused

_LONG_NUMBER = re.compile(r"\d{16,}")  # orjson reads integers beyond 64 bits as floats


def to_json(value: Any) -> str:
    """Compact JSON text. Raises StoreRefused for what JSON or UTF-8 cannot hold (lone surrogates, NaN)."""
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:  # orjson: integers beyond 64 bits, surrogates, unknown types
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            text.encode()
        except (TypeError, ValueError) as second:
            raise StoreRefused(f"not storable as JSON: {error}") from second
        return text


def from_json(text: str) -> Any:
    """The value of JSON text that `to_json` or a checked request made."""
    return json.loads(text) if _LONG_NUMBER.search(text) else orjson.loads(text)
