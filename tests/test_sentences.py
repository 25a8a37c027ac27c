"""Sentences of the documents are short: none has more than forty words, few more than thirty."""

from __future__ import annotations

import re

import pytest
from documents import PAGES, ROOT

MOST, MANY, SHARE = 40, 30, 0.02
AIM, FIRST = 25, re.compile(r"README\.md|docs/(?:index|install|quickstart|platform)\.md|docs/tutorials/.+\.md")
_ABBREVIATED = re.compile(r"\b(e\.g|i\.e|et al|vs|cf|Eq|eq|Fig|resp|approx)\.")
_SAID = r"\{(?:note|tip|warning|important|admonition)\}"  # blocks of words


def sentences(text: str) -> list[str]:
    """The sentences of a page: without code, tables, headings, and what programs write between marks."""
    text = re.sub(r"<!-- (.+?) -->\n.*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->|<(picture|details)>.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(rf"^( *)(`{{3,}})(?!{_SAID}).*?^\1\2$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ *(?::{3,}.*|:[\w-]+:.*)$|^\s*\|.*$|^#+ .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = _ABBREVIATED.sub(r"\1", re.sub(r"(`+).+?\1", "code", text, flags=re.DOTALL))
    parts = re.split(r"\n\s*\n|^\s*(?:[*+-]|\d+\.|:) +", text, flags=re.MULTILINE)
    return [one for part in parts for one in re.split(r"(?<=[.!?])[*_)\"']*\s+", " ".join(part.split())) if words(one)]


def words(sentence: str) -> int:
    """How many words: what has a letter or a digit."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_is_long(page):
    long = [one for one in sentences((ROOT / page).read_text()) if words(one) > MOST]
    assert not long, long


@pytest.mark.parametrize("page", [page for page in PAGES if FIRST.fullmatch(page)])
def test_sentences_are_short_where_readers_begin(page):
    long = [one for one in sentences((ROOT / page).read_text()) if words(one) > AIM]
    assert not long, long


def test_few_sentences_are_rather_long():
    found = [(page, one) for page in PAGES for one in sentences((ROOT / page).read_text())]
    many = [(page, one) for page, one in found if words(one) > MANY]
    assert len(many) <= SHARE * len(found), many


def test_what_a_sentence_is():
    text = (
        "# A head that does not count\n\nOne `a b c` two, e.g. three. Four!\n\n* five [six seven](x.md#y)\n* eight\n\n"
        "| no | no |\n|---|---|\n\n```sh\nno no no\n```\n\n<!-- made by x: y -->\nno no\n<!-- end -->\n\n"
        ":::{note}\nNine ten.\n:::\n"
    )
    assert [words(one) for one in sentences(text)] == [5, 1, 3, 1, 2]
