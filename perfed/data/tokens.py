"""Texts as token ids."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2
"""Token ids: nothing, a word outside the vocabulary, and the first word of the vocabulary."""

LINK = "<link>"
_TOKEN = re.compile(r"https?://\S+|[@#]?\w+(?:'\w+)*|[^\w\s]")


def tokenise(text: str) -> list[str]:
    """Lower-case words (with ``@`` or ``#`` before and apostrophes inside), and single other signs; spaces separate.

    Every link is the same token.

    Example:
        >>> tokenise("@united DON’T go!! http://t.co/x")
        ['@united', "don't", 'go', '!', '!', '<link>']
    """
    found = _TOKEN.findall(text.lower().replace("’", "'"))
    return [LINK if token.startswith(("http://", "https://")) else token for token in found]


def vocabulary(texts: Iterable[Sequence[str]], size: int) -> tuple[str, ...]:
    """The ``size`` most frequent tokens of tokenised texts, most frequent first, ties in alphabetical order."""
    counts = Counter(token for text in texts for token in text)
    return tuple(sorted(counts, key=lambda token: (-counts[token], token))[:size])


def encode(texts: Sequence[Sequence[str]], words: Sequence[str], length: int) -> NDArray[np.float32]:
    """Token ids ``(texts, length)`` of tokenised texts: cut after ``length`` tokens, padded behind the last.

    Word j of ``words`` has the id j + 2. Inputs of models are floating-point; whole numbers up to 2^24 are exact.
    """
    place = {word: FIRST_WORD + position for position, word in enumerate(words)}
    ids = np.full((len(texts), length), PADDING, dtype=np.float32)
    for row, text in enumerate(texts):
        known = [place.get(token, UNKNOWN) for token in text[:length]]
        ids[row, : len(known)] = known
    return ids
