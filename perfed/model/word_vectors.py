"""Files of word vectors: GloVe's text format, or ``.npz``."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perfed.data.files import find_file, load_npz
from perfed.errors import PerfedError

Vectors = tuple[NDArray[np.int64], NDArray[np.float32]]


@lru_cache(maxsize=1)  # every stage of every client's model starts from them
def read_vectors(name: str, words: tuple[str, ...], dimension: int) -> Vectors:
    """Vectors of some words from a file.

    Args:
        name: a path, or the name of a file in the folders of data (:func:`perfed.data.files.find_file`). ``.npz``
            holds ``words`` (text) and ``vectors (words, dimension)``; any other file is text, a line for each word:
            the word and its numbers, with single spaces between them (GloVe's format).
        words: the words that are wanted.
        dimension: numbers of each.

    Returns:
        Positions in ``words`` of those that the file has, ``(found,)`` ascending, and their vectors
        ``(found, dimension)`` float32; the first where the file has a word twice.

    Raises:
        PerfedError: no words to look for, no such file, a line or an array of another size, something that is not a
            finite number, or none of the words; one line that names the file.
    """
    if not words:
        raise PerfedError(f"word vectors '{name}' need data that say which words their token ids are ('tweets')")
    place = {word: position for position, word in enumerate(words)}
    path = Path(name) if Path(name).is_file() else find_file(name)
    rows = _from_npz(path, place, dimension) if path.suffix == ".npz" else _from_text(path, place, dimension)
    if not rows:
        raise PerfedError(f"file '{path}' has vectors for none of the {len(words)} words of the data")
    found = np.array(sorted(rows), dtype=np.int64)
    values = np.stack([rows[position] for position in found.tolist()])
    bad = np.flatnonzero(~np.isfinite(values).all(1))
    if len(bad):
        raise PerfedError(f"file '{path}': the vector of '{words[found[bad[0]]]}' holds NaN or infinity")
    return found, values


def _from_npz(path: Path, place: dict[str, int], dimension: int) -> dict[int, NDArray[np.float32]]:
    data = load_npz(str(path.absolute()), None, ["words", "vectors"])
    words, vectors = data["words"], data["vectors"]
    if words.ndim != 1 or words.dtype.kind != "U":
        raise PerfedError(f"file '{path}': 'words' is {words.dtype} {words.shape}, not text (words,)")
    if vectors.dtype.kind != "f" or vectors.shape != (len(words), dimension):
        raise PerfedError(
            f"file '{path}': 'vectors' is {vectors.dtype} {vectors.shape}, not numbers ({len(words)}, {dimension})"
        )
    rows: dict[int, NDArray[np.float32]] = {}
    for row, word in enumerate(words.tolist()):
        if word in place:
            rows.setdefault(place[word], vectors[row].astype(np.float32))
    return rows


def _from_text(path: Path, place: dict[str, int], dimension: int) -> dict[int, NDArray[np.float32]]:
    rows: dict[int, NDArray[np.float32]] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                _add_line(rows, line.rstrip("\n"), place, dimension, f"file '{path}', line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise PerfedError(f"file '{path}' cannot be read as UTF-8 text ({error})") from None
    return rows


def _add_line(
    rows: dict[int, NDArray[np.float32]], line: str, place: dict[str, int], dimension: int, where: str
) -> None:
    word, *numbers = line.rsplit(" ", dimension)  # some files have words with spaces
    before, _, last = word.rpartition(" ")
    if before and _is_number(last):
        word = line.partition(" ")[0]
        raise PerfedError(f"{where}: more numbers behind '{word[:40]}' than dimension = {dimension}")
    if len(numbers) != dimension:
        raise PerfedError(f"{where}: {len(numbers)} numbers behind '{word[:40]}', not dimension = {dimension}")
    if word not in place or place[word] in rows:
        return
    try:
        rows[place[word]] = np.array(numbers, dtype=np.float32)
    except ValueError:
        raise PerfedError(f"{where}: what stands behind '{word[:40]}' are not all numbers") from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
