"""The models of a local stack: those of the package, fitted to this machine's ports and choices.

`perdure dev` writes them to `models.toml` in its data folder, where every process reads them; `--models FILE`
is taken as it is.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

EMBEDDED_MODEL = "smollm2-135m"
SIMULATED_MODEL = "simulated"
API_KEY_ENV = "PERDURE_MODEL_API_KEY"


def builtin_models(
    *, base_url: str | None, served_model: str | None = None, foreign: bool = False, key: bool = False
) -> dict[str, Any]:
    """The content of models.toml with the small model at `base_url`; without it when that is None.

    `foreign`: not the embedded server. What is only known of that one (context size, how it continues a text)
    then falls away; with `key` the GPU worker sends PERDURE_MODEL_API_KEY.
    """
    content = tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))
    if base_url is None:
        del content["models"][EMBEDDED_MODEL]
        return content
    model = content["models"][EMBEDDED_MODEL]
    model["base_url"] = base_url
    if foreign:
        for known in ("context_tokens", "resume"):
            model.pop(known, None)
        if key:
            model["api_key_env"] = API_KEY_ENV
        model["served_model"] = served_model or EMBEDDED_MODEL
    return content


def embedded_base_url(port: int) -> str:
    return f"http://127.0.0.1:{port}/v1"


def normal_base_url(url: str) -> str:
    """A model server's address as executors want it: `http://host:1234` becomes `http://host:1234/v1`.

    Raises ValueError when it is no http address.
    """
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"PERDURE_MODEL_URL={url}: give an address such as http://127.0.0.1:8000/v1")
    bare = url.strip().rstrip("/")
    return bare if parts.path.strip("/") else bare + "/v1"


async def first_model(base_url: str, api_key: str | None) -> str | None:
    """The first model that a server lists; None when it does not answer, or not so."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with httpx.AsyncClient(timeout=3, trust_env=False) as http:
            answer = await http.get(f"{base_url}/models", headers=headers)
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError):
        return None


def to_toml(content: Mapping[str, Any], head: str = "") -> str:
    """TOML of nested tables whose values are strings, numbers, booleans and lists of those."""
    lines = [f"# {line}" for line in head.splitlines()]
    _table(lines, content, "")
    return "\n".join(lines) + "\n"


def _table(lines: list[str], table: Mapping[str, Any], path: str) -> None:
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in table.items() if key not in inner}
    if path and (plain or not inner):
        lines += ["", f"[{path}]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in inner.items():
        _table(lines, value, f"{path}.{_key(key)}" if path else _key(key))


def _key(key: str) -> str:
    return key if key.replace("-", "").replace("_", "").isalnum() and key.isascii() else json.dumps(key)


def _value(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, bool | int | float | str):
        return json.dumps(value, ensure_ascii=False)  # for these, JSON is TOML
    raise TypeError(f"no TOML for {type(value).__name__}")
