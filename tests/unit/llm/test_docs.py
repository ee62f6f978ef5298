"""docs/models.md names everything that models.toml and the faults know."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.llm.openai import NO_ANSWER, PROMPT_CUT
from perdure.models import Catalogue, Model, Pool, User
from perdure.task.errors import ErrorCode

TEXT = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
NOT_OF_AN_ATTEMPT = {
    ErrorCode.WORKER_LOST,
    ErrorCode.QUEUE_EXPIRED,
    ErrorCode.DEADLINE_EXCEEDED,
    ErrorCode.TERMINATED,
}


@pytest.mark.parametrize("kind", [Catalogue, Pool, Model, User])
def test_every_key_is_explained(kind: type[Catalogue] | type[Pool] | type[Model] | type[User]) -> None:
    tables = {"pools", "models", "users"}
    missing = [name for name in kind.model_fields if f"`{name}`" not in TEXT and name not in tables]
    assert missing == []


def test_defaults_are_the_documented_ones() -> None:
    for kind in (Pool, Model):
        for name, field in kind.model_fields.items():
            default = field.default
            if isinstance(default, bool) or not isinstance(default, int | float):
                continue
            row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{name}` |"))
            assert row.split("|")[2].strip() == f"{default:,}", row


def test_every_fault_of_an_attempt_is_in_the_table() -> None:
    assert [code for code in ErrorCode if f"`{code}`" not in TEXT and code not in NOT_OF_AN_ATTEMPT] == []
    assert f"`{NO_ANSWER}`" in TEXT
    assert f"`{PROMPT_CUT}`" in TEXT
