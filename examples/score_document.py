"""A model that is no language model: a document, scored page by page, by the `python` executor.

    [models.page-score]
    pool = "local"
    executor = "python"
    import_path = "examples.score_document:score"

    curl localhost:8000/v1/tasks --json '{"model_id": "page-score", "params": {"pages": ["One.", "Two."]}}'

`params.pages` is a list of texts. Each page gets a score for how easy it reads (0-100). Progress and
checkpoint follow every page, so a task whose worker is killed or drained goes on with the next page, not with
the first.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from typing import Any

from perdure.contracts import Beat
from perdure.llm.python import Report
from perdure.task.errors import ErrorCode, TaskFault

_WORD = re.compile(r"[^\W\d_]+")
_SENTENCE = re.compile(r"[.!?]+(?:\s|$)")
_VOWELS = re.compile(r"[aeiouy]+", re.IGNORECASE)


async def score(
    params: dict[str, Any], checkpoint: Beat | None, report: Report
) -> AsyncGenerator[str | dict[str, Any], None]:
    """Yields a line of text per page, and in the end the scores and their mean in the result."""
    pages = params.get("pages")
    if not isinstance(pages, list) or not pages or not all(isinstance(page, str) for page in pages):
        raise TaskFault(ErrorCode.INVALID_REQUEST, "params.pages must be a list of texts, at least one")
    scores: list[float] = checkpoint.state["scores"] if checkpoint else []
    for number in range(len(scores), len(pages)):
        report(100 * number // len(pages), f"page {number + 1} of {len(pages)}")
        # Heavy work goes to a thread (or a GPU): the worker's event loop must stay free for heartbeats.
        found = await asyncio.to_thread(reading_ease, pages[number])
        scores = [*scores, found]
        # Text and state in one step: a checkpoint never holds the one without the other.
        yield {"text": f"page {number + 1}: {found:.1f}\n", "state": {"scores": scores}}
    mean = round(sum(scores) / len(scores), 1)
    yield {"result": {"finish_reason": "stop", "scores": scores, "mean": mean}}


def reading_ease(text: str) -> float:
    """Flesch's reading ease of an English text, kept within 0 and 100. A text without words is easy: 100."""
    words = _WORD.findall(text)
    if not words:
        return 100.0
    sentences = max(1, len(_SENTENCE.findall(text)))
    syllables = sum(max(1, len(_VOWELS.findall(word))) for word in words)
    ease = 206.835 - 1.015 * len(words) / sentences - 84.6 * syllables / len(words)
    return round(min(100.0, max(0.0, ease)), 1)
