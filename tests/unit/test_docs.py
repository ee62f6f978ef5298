"""Links between our pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(link)
    assert not dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_pages_exist(page: Path) -> None:
    """`make VERB` and `perdure COMMAND` as pages name them."""
    from perdure.cli import app

    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = {
        command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands
    }
    commands |= {group.name for group in app.registered_groups}
    text = page.read_text()
    assert not set(re.findall(r"(?:`|^|\$ )make ([a-z][a-z-]+)", text, re.MULTILINE)) - verbs
    assert not set(re.findall(r"(?:`|^|\$ |bin/)perdure ([a-z][a-z-]+)", text, re.MULTILINE)) - commands
