"""Conversion of texts to token ids."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2
"""The token ids of padding, of words outside the vocabulary, and of the first word of the vocabulary."""

LINK = "<link>"
_TOKEN = re.compile(r"https?://\S+|[@#]?\w+(?:'\w+)*|[^\w\s]")


def tokenise(text: str) -> list[str]:
    """Split a text into lower-case tokens.

    A token is a word, which may start with ``@`` or ``#`` and contain apostrophes, or a single other sign. All links
    are replaced by the same token.

    Example:
        >>> tokenise("@united DON’T go!! http://t.co/x")
        ['@united', "don't", 'go', '!', '!', '<link>']
    """
    tokens = _TOKEN.findall(text.lower().replace("’", "'"))
    return [LINK if token.startswith(("http://", "https://")) else token for token in tokens]


def vocabulary(texts: Iterable[Sequence[str]], size: int) -> tuple[str, ...]:
    """Return the ``size`` most frequent tokens of tokenised texts by decreasing frequency; ties are alphabetical."""
    counts = Counter(token for text in texts for token in text)
    return tuple(sorted(counts, key=lambda token: (-counts[token], token))[:size])


def encode(texts: Sequence[Sequence[str]], words: Sequence[str], length: int) -> NDArray[np.float32]:
    """Return token ids ``(texts, length)`` of tokenised texts, which are cropped or padded to ``length`` tokens.

    Word j of ``words`` has the id j + 2. The ids are floating-point, as inputs of models are; whole numbers up to 2^24
    are exact.
    """
    place = {word: FIRST_WORD + position for position, word in enumerate(words)}
    ids = np.full((len(texts), length), PADDING, dtype=np.float32)
    for row, text in enumerate(texts):
        token_ids = [place.get(token, UNKNOWN) for token in text[:length]]
        ids[row, : len(token_ids)] = token_ids
    return ids
