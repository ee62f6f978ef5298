"""What the terminal commands read and print."""

from __future__ import annotations

import io
import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure.client import ApiRefused, ClientError, Event, Unreachable
from perdure.commands import exits, show
from perdure.commands.exits import UsageError
from perdure.commands.prompt import chat_params, pairs, read_prompt

ESCAPES = "a\x1b[31mred\x1b]0;title\x07\r\nb\tc\x9bd\u2028e"


def task(**changes: Any) -> dict[str, Any]:
    return {
        "task_id": "task_1",
        "status": "PROCESSING",
        "progress": 42,
        "model_id": "m",
        "task_type": "chat",
        "priority": "NORMAL",
        "error_code": None,
        "error_message": None,
        "retry_count": 0,
        "max_retries": 3,
        "created_at": "2026-12-01T14:00:00.000000Z",
        "started_at": None,
        "completed_at": None,
        "usage": {"prompt_tokens": None, "completion_tokens": 7},
        "queue": None,
        "result": None,
        **changes,
    }


class _Stdin(io.TextIOWrapper):
    """Standard input that is a pipe, or a person."""

    def __init__(self, raw: bytes, person: bool = False) -> None:
        super().__init__(io.BytesIO(raw))
        self._person = person

    def isatty(self) -> bool:
        return self._person


# The prompt -----------------------------------------------------------------------------------------
def test_a_prompt_comes_from_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file \u00e4")
    assert read_prompt("an argument", None) == "an argument"
    assert read_prompt(None, file) == "from a file \u00e4"
    for argument, path in ((None, None), ("-", None), (None, Path("-"))):
        monkeypatch.setattr(sys, "stdin", _Stdin(b"from a pipe\n"))
        assert read_prompt(argument, path) == "from a pipe\n"


@pytest.mark.parametrize(
    ("argument", "raw", "person", "word"),
    [
        (None, b"", True, "no prompt"),
        (None, b"", False, "no prompt"),
        (None, b" \n", False, "no prompt"),
        (None, b"\xff\xfe", False, "UTF-8"),
        (None, b"x" * (1024 * 1024 + 1), False, "more than"),
    ],
)
def test_what_is_no_prompt(
    argument: str | None, raw: bytes, person: bool, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", _Stdin(raw, person))
    with pytest.raises(UsageError, match=word):
        read_prompt(argument, None)


def test_two_prompts_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not both"):
        read_prompt("x", tmp_path / "y")
    with pytest.raises(UsageError, match="cannot be read"):
        read_prompt(None, tmp_path / "missing")


def test_params_and_pairs() -> None:
    assert chat_params("hi", "be kind", 5, '{"temperature": 0, "max_tokens": 6}') == {
        "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}],
        "max_tokens": 6,
        "temperature": 0,
    }
    assert chat_params("hi", None, None, None) == {"messages": [{"role": "user", "content": "hi"}]}
    assert pairs(["a=b=c", "d="]) == {"a": "b=c", "d": ""}
    for bad in ("[1]", "{", "1"):
        with pytest.raises(UsageError):
            chat_params("hi", None, None, bad)
    with pytest.raises(UsageError):
        pairs(["novalue"])


# What is printed ------------------------------------------------------------------------------------
def test_nothing_steers_the_terminal() -> None:
    safe = show.harmless(ESCAPES)
    assert safe == "a\ufffd[31mred\ufffd]0;title\ufffd\ufffd\nb\tc\ufffdd\ufffde"
    assert not any(ord(letter) < 32 and letter not in "\n\t" for letter in safe)


def test_a_pipe_gets_the_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    show.print_text(ESCAPES)
    assert capsys.readouterr().out == ESCAPES + "\n"


def test_a_status_in_one_line() -> None:
    assert show.status_line(task()) == "task_1 PROCESSING 42 %"
    failed = task(status="FAILED", error_code="internal", error_message="two\nlines\x1b[0m")
    assert show.status_line(failed) == "task_1 FAILED internal: two lines [0m"
    start = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()
    queue = {"reason": "behind_higher_priority", "ahead": 7, "position": 8, "estimated_start_at": start}
    line = show.status_line(task(status="QUEUED", queue=queue))
    assert line == "task_1 QUEUED (waits behind higher priority, about 7 ahead, starts in about 5 min)"
    queue = {"reason": "no_worker", "ahead": 0, "position": 1, "estimated_start_at": None}
    assert (
        show.status_line(task(status="PENDING", queue=queue)) == "task_1 PENDING (no worker serves its model)"
    )


def test_lines_say_each_thing_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = show.LineShow()
    for data in (task(progress=1), task(progress=1), task(progress=2)):
        lines.event(Event("1", "task-update", data))
    lines.end(task(status="COMPLETED", result={"text": "the text"}))
    assert capsys.readouterr().out == "task_1 PROCESSING 1 %\ntask_1 PROCESSING 2 %\n\nthe text\n"


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = show.show_for(as_json=True)
    lines.event(Event("1", "task-update", task()))
    lines.end(task(status="COMPLETED"))
    out = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["status"] for line in out] == ["PROCESSING", "COMPLETED"]


def test_a_task_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    show.print_task(task(status="COMPLETED", progress=100, result={"text": "line\nline"}))
    out = capsys.readouterr().out
    assert "status:    COMPLETED\n" in out
    assert "tokens:    7 written, ? read\n" in out
    assert "error" not in out
    assert out.endswith("\n\nline\nline\n")


def test_a_result_without_text_is_shown_as_json() -> None:
    assert show.text_of(task(result={"label": "cat"})) == '{"label": "cat"}'
    assert show.text_of(task(partial_text="so far")) == "so far"
    assert show.text_of(task()) == ""


def test_a_list_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    show.print_table([task(), task(model_id="odd\tname")])
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["task_1", "PROCESSING", "42", "NORMAL", "m", "2026-12-01T14:00:00.000000Z"]
    assert rows[1][4] == "odd name"


# How it ends ----------------------------------------------------------------------------------------
def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    async def ends(outcome: int | BaseException) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    cases: list[tuple[int | BaseException, int]] = [
        (exits.of_task(task(status="COMPLETED")), 0),
        (exits.of_task(task(status="FAILED")), 1),
        (exits.of_task(task(status="CANCELLED")), 3),
        (UsageError("x"), 2),
        (Unreachable("x"), 4),
        (ClientError("x"), 4),
        (ApiRefused(404, "task-not-found", "x"), 5),
    ]
    for outcome, code in cases:
        with pytest.raises(SystemExit) as ended:
            exits.run(ends(outcome))
        assert ended.value.code == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("perdure: ") for line in lines)
