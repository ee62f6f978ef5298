"""Message lists that a chat model can accept, in OpenAI's shape.

    faults = check_messages(value, remote=False)       [(path, code, why)], empty when it is sound

Refused is what no chat model accepts; legal forms (null content with tool calls, content as parts) pass
unchanged. A part that holds a URL would make the model server fetch it from inside the network: only `data:`
passes, and public http(s) addresses where the model allows them.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from perdure.callback.guard import CallbackRejected, GuardPolicy, check_url

MAX_MESSAGES: Final = 4096
MAX_PARTS: Final = 512
MAX_TOOL_CALLS: Final = 128
ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_URL_PARTS: Final = ("image_url", "audio_url", "video_url")
_DATA_URL: Final = re.compile(r"data:(image|audio|video)/[a-z0-9.+-]{1,64};base64,", re.IGNORECASE)
_REMOTE: Final = GuardPolicy(http=True, ports=frozenset({80, 443}))
_NAME: Final = re.compile(r"[^\x00-\x1f<>|\\/]{1,64}\Z")

Fault = tuple[tuple[object, ...], str, str]


def check_messages(value: Any, *, remote: bool) -> list[Fault]:
    """Faults of `messages`, each with its path. `remote`: http(s) URLs to public hosts may stand in parts."""
    if not isinstance(value, list):
        return [((), "list-type", "a list of messages is needed")]
    if not 1 <= len(value) <= MAX_MESSAGES:
        return [((), "length", f"1 to {MAX_MESSAGES} messages")]
    return [fault for index, message in enumerate(value) for fault in _message(message, (index,), remote)]


def _message(message: Any, path: tuple[object, ...], remote: bool) -> Iterator[Fault]:
    if not isinstance(message, dict):
        yield path, "object-type", "a message is an object"
        return
    role = message.get("role")
    if role not in ROLES:
        yield (*path, "role"), "role", "one of " + ", ".join(ROLES)
        return
    name = message.get("name")
    if name is not None and not (isinstance(name, str) and _NAME.match(name)):
        yield (*path, "name"), "name", "a name has 1 to 64 plain characters"
    calls = message.get("tool_calls")
    if calls is not None and role != "assistant":
        yield (*path, "tool_calls"), "not-allowed", "only an assistant message holds tool calls"
    elif calls is not None:
        yield from _tool_calls(calls, (*path, "tool_calls"))
    if role == "tool" and not _short_text(message.get("tool_call_id")):
        yield (*path, "tool_call_id"), "missing", "a tool message names its tool_call_id"
    if role == "function" and name is None:
        yield (*path, "name"), "missing", "a function message has a name"
    yield from _content(message, role, (*path, "content"), remote)


def _content(message: dict[str, Any], role: str, path: tuple[object, ...], remote: bool) -> Iterator[Fault]:
    content = message.get("content")
    if content is None:
        said_otherwise = any(message.get(key) for key in ("tool_calls", "function_call", "refusal"))
        if not (role == "assistant" and said_otherwise):
            yield path, "missing", "content is needed: text, or a list of parts"
    elif isinstance(content, list):
        if not 1 <= len(content) <= MAX_PARTS:
            yield path, "length", f"1 to {MAX_PARTS} parts"
            return
        for index, part in enumerate(content):
            yield from _part(part, role, (*path, index), remote)
    elif not isinstance(content, str):
        yield path, "content-type", "content is text or a list of parts"


def _tool_calls(calls: Any, path: tuple[object, ...]) -> Iterator[Fault]:
    if not isinstance(calls, list) or not 1 <= len(calls) <= MAX_TOOL_CALLS:
        yield path, "list-type", f"a list of 1 to {MAX_TOOL_CALLS} tool calls is needed"
        return
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        sound = (
            isinstance(call, dict)
            and _short_text(call.get("id"))
            and call.get("type") == "function"
            and isinstance(function, dict)
            and _short_text(function.get("name"))
            and isinstance(function.get("arguments"), str)
        )
        if not sound:
            why = 'a tool call is {"id", "type": "function", "function": {"name", "arguments": text}}'
            yield (*path, index), "tool-call", why


def _part(part: Any, role: str, path: tuple[object, ...], remote: bool) -> Iterator[Fault]:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or (kind not in _PARTS and kind not in _URL_PARTS):
        yield path, "part", "a part is an object of type " + ", ".join((*_PARTS, *_URL_PARTS))
    elif kind in _URL_PARTS:
        yield from _url_part(part, kind, role, path, remote)
    elif not _PARTS[kind](part):
        yield path, "part", f"this part is not what type {kind} needs"


def _url_part(
    part: dict[str, Any], kind: str, role: str, path: tuple[object, ...], remote: bool
) -> Iterator[Fault]:
    if role not in ("user", "tool"):
        yield path, "not-allowed", "only user and tool messages hold images, audio and video"
        return
    holder = part.get(kind)
    url = holder.get("url") if isinstance(holder, dict) else None
    if not isinstance(url, str) or (
        isinstance(holder, dict) and not _short_text(holder.get("detail", "auto"))
    ):
        yield (*path, kind), "url", 'an object {"url": …} is needed'
    elif why := _url_fault(url, remote):
        yield (*path, kind, "url"), "url-refused", why


def _url_fault(url: str, remote: bool) -> str | None:
    """Why the model server may not be given this URL, or None."""
    match = _DATA_URL.match(url)
    if match:
        return None if _is_base64(url[match.end() :]) else "the data: URL is not base64"
    if url[:5].lower() == "data:":
        return "a data: URL is data:image/…;base64,…"
    if not remote:
        return "only data: URLs are taken; this model does not allow remote ones"
    try:
        check_url(url, _REMOTE)
    except CallbackRejected:
        return "only public http and https addresses are taken"
    return None


def _is_base64(text: str) -> bool:
    try:
        return bool(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        return False


def _input_audio(part: dict[str, Any]) -> bool:
    audio = part.get("input_audio")
    return (
        isinstance(audio, dict)
        and isinstance(audio.get("data"), str)
        and _short_text(audio.get("format"))
        and _is_base64(audio["data"])
    )


def _file(part: dict[str, Any]) -> bool:
    file = part.get("file")
    return isinstance(file, dict) and isinstance(file.get("file_data"), str) and "file_id" not in file


def _short_text(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= 256


_PARTS: Final[dict[str, Callable[[dict[str, Any]], bool]]] = {
    "text": lambda part: isinstance(part.get("text"), str),
    "refusal": lambda part: isinstance(part.get("refusal"), str),
    "input_audio": _input_audio,
    "file": _file,
}
