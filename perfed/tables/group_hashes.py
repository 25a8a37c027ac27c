"""Hashes of the groups of rows, such as patients, which are equal for equal groups at all sites."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from decimal import Context
from typing import Any

import numpy as np

from perfed.data.groups import Keys
from perfed.tables.problems import Series, pandas

_NUMBER = re.compile(r"[+-]?(\d{1,100}(\.\d{0,100})?|\.\d{1,100})(e[+-]?\d{1,3})?")
_MIDNIGHT = re.compile(r"(?<=\d)[t ]00:00(:00(\.0+)?)?(z|\+00:00)?$")
_EXACT = Context(prec=1200)


def hash_groups(values: Series) -> Keys:
    """Return an integer hash for each row; rows with equal values have equal hashes, at all sites.

    Values are equal if :func:`canonical_text` returns the same text for them. No value may be missing.

    Example:
        >>> import pandas as pd
        >>> numbers, texts = hash_groups(pd.Series([7, 12])), hash_groups(pd.Series(["12.0", "7"]))
        >>> numbers.tolist() == texts[::-1].tolist()
        True
    """
    rows, distinct = pandas().factorize(values)
    digests = [hashlib.blake2b(canonical_text(value).encode(), digest_size=8).digest() for value in distinct]
    numbers: Keys = np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64)[rows]
    return numbers


def canonical_text(value: Any) -> str:
    """Return the same text for all ways in which files write a value: as number or text, in any case and Unicode form.

    Texts that differ only in case, spaces, leading zeros, or composed and decomposed accents are equal, and so are
    dates with and without midnight. The comparison is lenient because two patients with the same text merely stay
    together, whereas one patient with two texts could be in the training rows and in the test rows.

    Example:
        >>> [canonical_text(value) for value in (7, 7.0, "007", " 7.0 ", "P 07", "p  07")]
        ['7', '7', '7', '7', 'p 07', 'p 07']
    """
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", str(value)).casefold())
    text = _MIDNIGHT.sub("", " ".join(text.split()))
    if not _NUMBER.fullmatch(text):
        return text
    number = _EXACT.create_decimal(text).normalize(_EXACT)
    return "0" if not number else f"{number:f}" if -30 < number.adjusted() < 30 else str(number)
