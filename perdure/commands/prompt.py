"""What `perdure submit` sends: the prompt from an argument, a file or stdin, and the rest of the body."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perdure.commands.exits import UsageError

MAX_PROMPT = 1024 * 1024  # bytes: the API takes no larger body


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt. Raises UsageError where there is none, or two."""
    if argument is not None and argument != "-" and file is not None:
        raise UsageError("give the prompt as an argument or with --file, not both")
    if file is not None and str(file) != "-":
        try:
            raw = file.read_bytes()
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror}") from error
        return _text(raw, str(file))
    if argument is not None and argument != "-":
        return argument
    if argument is None and file is None and sys.stdin.isatty():
        raise UsageError('there is no prompt: perdure submit "…", --file FILE, or a pipe')
    return _text(sys.stdin.buffer.read(MAX_PROMPT + 1), "stdin")


def _text(raw: bytes, where: str) -> str:
    if len(raw) > MAX_PROMPT:
        raise UsageError(f"{where} holds more than {MAX_PROMPT} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8 text") from error
    if not text.strip():
        raise UsageError(f"{where} holds no prompt")
    return text


def chat_params(prompt: str, system: str | None, max_tokens: int | None, extra: str | None) -> dict[str, Any]:
    """`params` of a chat model; `extra` is a JSON object that wins over the rest."""
    messages = [{"role": "system", "content": system}] if system else []
    params: dict[str, Any] = {"messages": [*messages, {"role": "user", "content": prompt}]}
    if max_tokens is not None:
        params["max_tokens"] = max_tokens
    return {**params, **_object(extra)}


def _object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--params is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError("--params is a JSON object, like '{\"temperature\": 0}'")
    return value


def pairs(values: Sequence[str]) -> dict[str, str]:
    """`--metadata key=value`, given any number of times."""
    found: dict[str, str] = {}
    for value in values:
        name, sign, text = value.partition("=")
        if not sign or not name:
            raise UsageError(f"--metadata {value!r}: write key=value")
        found[name] = text
    return found
