"""Words of the glossary lead to it: on every page of the site a word's first place is a link, with its meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

PAGE = "glossary"
EVERYDAY = {"method", "personal", "plan", "reference", "run", "shared"}
"""Words that mostly stand on pages in their everyday sense: they have a mark to link to, and no links of their own."""
_APART = {PAGE, "changelog", "contributing", "security"}
_NO_PROSE = (nodes.reference, nodes.literal, nodes.title, nodes.caption)


def meanings(text: str) -> dict[str, str]:
    """What the glossary says of each word, in plain text.

    Example:
        >>> meanings("body\\n: The middle stage.")
        {'body': 'The middle stage.'}
    """
    found = re.findall(r"^(\S.*)\n: (.+)$", text, re.MULTILINE)
    return {word.split(",")[0]: re.sub("[*`]", "", said) for word, said in found}


def mark(word: str) -> str:
    """Where the glossary's page has a word."""
    return f"term-{nodes.make_id(word)}"


def parted(text: str, words: set[str]) -> Iterator[tuple[str, str]]:
    """Cut a text where it has one of ``words`` for the first time: its parts, and the word that each is, or ``""``.

    Words are found in the plural, too; they are taken out of ``words``.

    Example:
        >>> list(parted("Clients have clients.", {"client"}))
        [('Clients', 'client'), (' have clients.', '')]
    """
    start = 0
    every = "|".join(sorted(map(re.escape, words), key=len, reverse=True))
    for found in re.finditer(rf"\b({every})s?\b", text, re.IGNORECASE) if words else ():
        word = found[1].lower()
        if word in words:
            words.remove(word)
            yield text[start : found.start()], ""
            yield found[0], word
            start = found.end()
    yield text[start:], ""


def link(app: Sphinx, page: nodes.document, name: str) -> None:
    """Make the links of one page, or the marks of the glossary; called by Sphinx where a page is written."""
    said: Mapping[str, str] = meanings((Path(app.confdir) / f"{PAGE}.md").read_text())
    if name == PAGE:
        for term in page.findall(nodes.term):
            term["ids"].append(mark(term.astext().split(",")[0]))
    if name in _APART:
        return
    there, left = app.builder.get_relative_uri(name, PAGE), {*said} - EVERYDAY
    for text in [text for of in page.findall(nodes.paragraph) for text in of.findall(nodes.Text) if _is_prose(text)]:
        parts = [
            nodes.reference("", part, refuri=f"{there}#{mark(word)}", reftitle=said[word], internal=True,
                            classes=["term"]) if word else nodes.Text(part)
            for part, word in parted(text.astext(), left) if part
        ]  # fmt: skip
        text.parent.replace(text, parts)


def _is_prose(text: nodes.Node) -> bool:
    """Neither a link, code or heading, nor a card of the first page, which is a link as a whole."""
    while (text := text.parent) is not None:
        if isinstance(text, _NO_PROSE) or (isinstance(text, nodes.Element) and "sd-card" in text.get("classes", ())):
            return False
    return True
