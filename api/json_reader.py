"""JSON from outside, read strictly: one meaning, and nothing that cannot be stored, signed or sent again.

    read_json(raw)           the value; raises Problem 400 `malformed-json` or 422 `value-refused`

Refused as malformed (400): other encodings than UTF-8, a BOM, bad syntax, NaN and Infinity, a key twice in
one object, nesting beyond MAX_DEPTH. Refused as values (422, named by pointer): integers beyond 64 bits,
numbers beyond a double, U+0000, lone surrogates. Ordinary bodies take one pass of the C scanner.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, Final, NoReturn

from api.problems import FieldError, Problem, invalid, pointer_of

MAX_DEPTH: Final = 64
MAX_CONTAINERS: Final = 200_000  # objects and lists in one body
MAX_VALUES: Final = 1_000_000
_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**63 - 1

_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # linear: an unclosed one ends too
_BRACES: Final = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_ODD_TEXT: Final = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")
_ODD_NUMBER: Final = re.compile(rb"[0-9]{19}|[0-9][eE]")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class _OutOfRange:
    """Stands for a number that no 64-bit integer or double holds, until the walk names its place."""


_OUT_OF_RANGE: Final = _OutOfRange()


def read_json(raw: bytes) -> Any:
    """The value of a JSON text. Raises Problem."""
    if raw.startswith(b"\xef\xbb\xbf"):
        _malformed("the text starts with a byte order mark")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        _malformed(f"the text is not UTF-8 (byte {error.start})")
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH or raw.count(b",") > MAX_VALUES:
        _check_shape(raw)
    odd_numbers = _ODD_NUMBER.search(raw) is not None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_int=_integer if odd_numbers else None,
            parse_float=_float if odd_numbers else None,
        )
    except json.JSONDecodeError as error:
        _malformed(f"{error.msg.lower().removesuffix(' at')} at line {error.lineno} column {error.colno}")
    if odd_numbers or _ODD_TEXT.search(raw):
        errors = list(_refused(value, ()))
        if errors:
            raise invalid(errors, "value-refused")
    return value


def _malformed(why: str) -> NoReturn:
    raise Problem(400, "malformed-json", f"The body is not acceptable JSON: {why}.") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        _malformed("a key stands twice in one object")
    return value


def _constant(_: str) -> NoReturn:
    _malformed("NaN and Infinity are not JSON")


def _integer(digits: str) -> int | _OutOfRange:
    if len(digits) > 20:  # longer than -(2**63): never converted, since conversion is quadratic
        return _OUT_OF_RANGE
    value = int(digits)
    return value if _INT_MIN <= value <= _INT_MAX else _OUT_OF_RANGE


def _float(text: str) -> float | _OutOfRange:
    value = float(text)
    return value if math.isfinite(value) else _OUT_OF_RANGE


def _check_shape(raw: bytes) -> None:
    """Bounds on nesting and on the number of values, so that no short text becomes a huge object."""
    skeleton = _STRING.sub(b"", raw)
    brackets = skeleton.translate(_BRACES, _NOT_BRACKETS)
    if skeleton.count(b",") > MAX_VALUES or len(brackets) > 2 * MAX_CONTAINERS:
        _malformed("it holds too many values")
    for _ in range(MAX_DEPTH):  # each pass takes the innermost level away
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        _malformed(f"nesting is deeper than {MAX_DEPTH}, or brackets do not match")


def _refused(value: Any, path: tuple[object, ...]) -> Iterator[FieldError]:
    """Every value that may not pass, with its place."""
    if isinstance(value, str):
        if why := _text_fault(value):
            yield FieldError(pointer_of(path), "text-refused", why)
    elif isinstance(value, dict):
        for key, item in value.items():
            if why := _text_fault(key):
                yield FieldError(pointer_of(path), "text-refused", f"a key: {why}")
            else:
                yield from _refused(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _refused(item, (*path, index))
    elif value is _OUT_OF_RANGE:
        yield FieldError(pointer_of(path), "number-out-of-range", "a number does not fit 64 bits")


def _text_fault(text: str) -> str | None:
    if text.isascii():
        return "text holds U+0000" if "\x00" in text else None
    if _SURROGATE.search(text):
        return "text holds a lone surrogate"
    return "text holds U+0000" if "\x00" in text else None
