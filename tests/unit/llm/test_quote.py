"""A server's own words: without the caller's."""

from __future__ import annotations

from perdure.llm.quote import quoted, texts_of


def test_a_short_prompt_is_hidden_whole() -> None:
    assert quoted("value CANARY-77 is wrong", ["CANARY-77"]) == "value [prompt] is wrong"


def test_ordinary_words_stay() -> None:
    assert quoted("the model is not ready", ["the", "model"]) == "the model is not ready"


def test_a_large_prompt_costs_little() -> None:
    text = "lorem ipsum dolor sit amet " * 40_000
    assert quoted("error in: lorem ipsum dolor sit amet lorem", [text]).startswith("error in: ")


def test_texts_are_found_wherever_they_stand() -> None:
    params = {
        "messages": [
            {"role": "system", "content": "one"},
            {"role": "user", "content": [{"type": "text", "text": "two"}]},
            "junk",
        ],
        "prompt": "three",
        "model": "no",
    }
    assert sorted(texts_of(params)) == ["junk", "one", "three", "two"]
