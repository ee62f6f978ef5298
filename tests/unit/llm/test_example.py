"""The example of the python executor does what its page says."""

from __future__ import annotations

from perdure.contracts import Beat
from perdure.llm.executors import build_executors
from perdure.models import parse_catalogue
from perdure.task.errors import ErrorCode
from tests.support.generation import attempt

CATALOGUE = parse_catalogue(
    """
    [pools.local]
    [models.page-score]
    pool = "local"
    executor = "python"
    import_path = "examples.score_document:score"
    """
)
EASY = "The cat sat on the mat. It was a good cat."
HARD = "Institutional considerations necessitate comprehensive infrastructural rehabilitation programmes."
PAGES = [EASY, HARD, "", EASY]


async def test_a_document_is_scored_page_by_page() -> None:
    executor = build_executors(CATALOGUE, "local", {})["page-score"]
    told = await attempt(executor, {"pages": PAGES})
    result = told.done.model_dump()
    assert len(result["scores"]) == 4
    assert result["scores"][0] > 90
    assert result["scores"][1] < 10
    assert result["scores"][2] == 100
    assert result["mean"] == round(sum(result["scores"]) / 4, 1)
    assert told.done.text.splitlines()[0] == f"page 1: {result['scores'][0]}"
    assert len(told.done.text.splitlines()) == 4
    assert [delta.progress for delta in told.deltas if delta.progress is not None] == [0, 25, 50, 75]
    assert told.beat.message == "page 4 of 4"


async def test_it_goes_on_with_the_next_page() -> None:
    executor = build_executors(CATALOGUE, "local", {})["page-score"]
    whole = await attempt(executor, {"pages": PAGES})
    for stop in range(1, 8):
        first = await attempt(executor, {"pages": PAGES}, stop_after=stop)
        checkpoint = Beat.model_validate_json(first.beat.model_dump_json())
        second = await attempt(executor, {"pages": PAGES}, number=2, checkpoint=checkpoint)
        assert second.done.text == whole.done.text
        assert second.done.model_dump()["scores"] == whole.done.model_dump()["scores"]
        made = sum(bool(delta.text) for delta in second.deltas)
        assert made == 4 - stop // 2


async def test_bad_params_are_the_callers_fault() -> None:
    executor = build_executors(CATALOGUE, "local", {})["page-score"]
    fault = (await attempt(executor, {"pages": []})).failed
    assert (fault.code, fault.retryable) == (ErrorCode.INVALID_REQUEST, False)
