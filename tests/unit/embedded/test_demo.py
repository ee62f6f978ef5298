from __future__ import annotations

from typing import Any

from perdure import demo
from perdure.models import parse_catalogue

TASK: dict[str, Any] = {
    "task_id": "task_" + "0" * 32,
    "status": "COMPLETED",
    "progress": 100,
    "result": {"text": "First line.\nSecond line."},
    "usage": {"prompt_tokens": 30, "completion_tokens": 20},
    "attempts": [
        {"started_at": "2026-12-01T10:00:00.000000Z", "ended_at": "2026-12-01T10:00:01.000000Z"},
        {"started_at": "2026-12-01T10:00:05.000000Z", "ended_at": "2026-12-01T10:00:09.000000Z"},
    ],
    "error_code": None,
    "error_message": None,
}


def test_report_shows_result_usage_speed_and_history() -> None:
    report = demo.Report(TASK, "http://ui/x")
    assert report.completed
    assert report.last_line == f"task_{'0' * 32} COMPLETED"
    assert report.lines() == [
        "",
        "First line.",
        "Second line.",
        "",
        "tokens        30 read, 20 written",
        "speed         5.0 tokens/s over the whole attempt",
        "history       http://ui/x",
    ]


def test_report_of_a_failed_task_says_why() -> None:
    failed = TASK | {
        "status": "FAILED",
        "result": None,
        "usage": {},
        "attempts": [],
        "error_code": "upstream_unavailable",
        "error_message": "nobody answers",
    }
    report = demo.Report(failed, "http://ui/x")
    assert not report.completed
    assert report.lines()[1:4] == ["(no text)", "", "error         upstream_unavailable: nobody answers"]
    assert "tokens        unknown read, unknown written" in report.lines()


def test_speed_is_unknown_without_times_or_tokens() -> None:
    assert demo.tokens_per_second(TASK | {"usage": {}}) is None
    assert demo.tokens_per_second(TASK | {"attempts": []}) is None
    same = {"started_at": "2026-12-01T10:00:00.000000Z", "ended_at": "2026-12-01T10:00:00.000000Z"}
    assert demo.tokens_per_second(TASK | {"attempts": [same]}) is None


def test_plain_lines_come_when_something_changed() -> None:
    said: list[str] = []
    show = demo.PlainShow(said.append)
    for status, progress in (("QUEUED", 0), ("QUEUED", 0), ("PROCESSING", 10), ("PROCESSING", 10)):
        show(TASK | {"status": status, "progress": progress})
    assert said == [f"task_{'0' * 32} QUEUED 0 %", f"task_{'0' * 32} PROCESSING 10 %"]


def test_model_is_the_small_one_else_the_first() -> None:
    pool = "[pools.p]\n[models.a]\npool = 'p'\nexecutor = 'simulated'\n"
    assert demo.choose_model(parse_catalogue(pool)) == "a"
    small = "[models.smollm2-135m]\npool = 'p'\nexecutor = 'simulated'\n"
    assert demo.choose_model(parse_catalogue(pool + small)) == "smollm2-135m"


def test_text_of_the_demo_ships_with_the_package_and_fits_the_small_model() -> None:
    body = demo.demo_body("m")
    (message,) = body["params"]["messages"]
    assert len(message["content"].split()) > 250
    assert len(message["content"]) < 4000  # about 500 tokens of 2,048
