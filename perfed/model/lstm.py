"""Texts as token ids: an embedding and bidirectional LSTM layers, a preset for the first stage of a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from perfed.data.files import find_file, load_npz
from perfed.data.tokens import FIRST_WORD, PADDING
from perfed.errors import PerfedError
from perfed.model.chain import Shape, StageFactory
from perfed.model.presets import activation_layer

Vectors = tuple[NDArray[np.int64], NDArray[np.float32]]


@lru_cache(maxsize=1)  # the same vectors initialise the models of all clients
def read_vectors(name: str, words: tuple[str, ...], dimension: int) -> Vectors:
    """Return the vectors of some words from a file.

    Args:
        name: a path, or the name of a file in the folders of data (:func:`perfed.data.files.find_file`). ``.npz``
            holds ``words`` (text) and ``vectors (words, dimension)``; any other file is text, a line for each word:
            the word and its numbers, with single spaces between them (GloVe's format).
        words: the words to look up.
        dimension: the length of a vector.

    Returns:
        The positions in ``words`` of the words that the file has, ``(n,)`` ascending, and their vectors
        ``(n, dimension)`` float32. If the file has a word twice, its first vector is used.

    Raises:
        PerfedError: if ``words`` is empty, the file does not exist, a line or an array has another size, a value is not
            a finite number, or the file has none of the words.
    """
    if not words:
        raise PerfedError(f"word vectors '{name}' need data that say which words their token ids are ('tweets')")
    place = {word: position for position, word in enumerate(words)}
    path = Path(name) if Path(name).is_file() else find_file(name)
    rows = (
        _read_npz_vectors(path, place, dimension)
        if path.suffix == ".npz"
        else _read_text_vectors(path, place, dimension)
    )
    if not rows:
        raise PerfedError(f"file '{path}' has vectors for none of the {len(words)} words of the data")
    positions = np.array(sorted(rows), dtype=np.int64)
    values = np.stack([rows[position] for position in positions.tolist()])
    bad = np.flatnonzero(~np.isfinite(values).all(1))
    if len(bad):
        raise PerfedError(f"file '{path}': the vector of '{words[positions[bad[0]]]}' holds NaN or infinity")
    return positions, values


def _read_npz_vectors(path: Path, place: dict[str, int], dimension: int) -> dict[int, NDArray[np.float32]]:
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


def _read_text_vectors(path: Path, place: dict[str, int], dimension: int) -> dict[int, NDArray[np.float32]]:
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
    word_start, _, last_part = word.rpartition(" ")
    if word_start and _is_number(last_part):
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


def lstm(
    vocabulary: int = 10_000,
    dimension: int = 100,
    *,
    width: int = 256,
    layers: int = 2,
    dropout: float = 0.5,
    fc: Sequence[int] = (),
    activation: str = "relu",
    vectors: str = "",
    words: Sequence[str] = (),
) -> StageFactory:
    """Return a stage: an embedding of tokens, bidirectional LSTM layers with dropout between them, then linear layers.

    Inputs are token ids ``(length,)``: 0 for padding, which changes no result wherever it is (a text of
    padding only counts as one token), 1 for unknown words, 2 and up for words. The LSTM's ``2 * width`` outputs are the
    last layer's states after the last token (forwards) and after the first one (backwards). Tziotis et al. 2023
    (appendix C) have ``lstm(10_000, 100, fc=(5,))`` with GloVe vectors.

    Args:
        vocabulary: number of words; ids are at most ``vocabulary + 1``.
        dimension: the size of the embedding.
        width: outputs of an LSTM layer in each direction.
        layers: number of LSTM layers.
        dropout: the dropout probability for the outputs of each LSTM layer except the last.
        fc: sizes of linear layers behind the LSTM, each followed by ``activation``.
        vectors: file of word vectors that initialise the embedding (:func:`perfed.model.lstm.read_vectors`);
            words that are not in it, or all words without a file, are initialised with normal numbers. The embedding is
            trained like any other parameter; ``placement = { "*.embedding.weight" = "frozen" }`` keeps it.
        words: the words with the ids from 2 on, which the data set of the experiment provides.

    Raises:
        PerfedError: if inputs are not vectors of token ids, or there are more words than ``vocabulary``.
    """

    def build(shape: Shape) -> nn.Module:
        if len(shape) != 1:
            raise PerfedError(f"lstm needs token ids (length,), got inputs of shape {shape}")
        if len(words) > vocabulary:
            raise PerfedError(f"lstm: vocabulary = {vocabulary} is less than the {len(words)} words of the data")
        embedding_and_lstm = TextLSTM(vocabulary, dimension, width, layers, dropout)
        if vectors:
            positions, values = read_vectors(vectors, tuple(words), dimension)
            embedding_and_lstm.embedding.weight.data[FIRST_WORD + torch.from_numpy(positions)] = torch.from_numpy(
                values
            )
        linear_layers: list[nn.Module] = []
        size = 2 * width
        for outputs in fc:
            linear_layers += [nn.Linear(size, outputs), activation_layer(activation)]
            size = outputs
        return nn.Sequential(embedding_and_lstm, *linear_layers)

    return build


class TextLSTM(nn.Module):
    """A module from token ids ``(batch, length)`` to the last states of both directions ``(batch, 2 * width)``."""

    def __init__(self, vocabulary: int, dimension: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(FIRST_WORD + vocabulary, dimension, padding_idx=PADDING)
        sizes = [dimension, *[2 * width] * (layers - 1)]
        self.layers = nn.ModuleList(nn.LSTM(size, width, batch_first=True, bidirectional=True) for size in sizes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last states for ``x`` ``(batch, length)``, whole numbers of any type."""
        if torch.compiler.is_compiling():  # a graph has no packed sequences, and no checks of values
            return self._forward_padded(*_move_padding_back(x.long(), cut=False))
        ids, lengths = _move_padding_back(self._check_token_ids(x))
        packed = pack_padded_sequence(self.embedding(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        last = torch.empty(0)
        for number, layer in enumerate(self.layers):
            if number > 0:
                packed = PackedSequence(self.dropout(packed.data), *packed[1:])
            packed, (last, _) = layer(packed)
        return last.transpose(0, 1).flatten(1)

    def _forward_padded(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the same as :meth:`forward` in evaluation mode, with steps over padding that affect no token and no
        last state.
        """
        steps, count = torch.arange(ids.shape[1], device=ids.device), lengths[:, None]
        reversed_order = torch.where(steps < count, count - 1 - steps, steps)  # tokens from last to first, then padding
        x, ends = self.embedding(ids), (lengths - 1)[:, None, None]
        last = []
        for layer in self.layers:
            forwards = _run_direction(layer, x, "")
            backwards = _run_direction(
                layer, x.gather(1, reversed_order[:, :, None].expand(-1, -1, x.shape[2])), "_reverse"
            )
            last = [out.gather(1, ends.expand(-1, 1, out.shape[2])).squeeze(1) for out in (forwards, backwards)]
            x = torch.cat([forwards, backwards.gather(1, reversed_order[:, :, None].expand_as(backwards))], 2)
        return torch.cat(last, 1)

    def _check_token_ids(self, x: Tensor) -> Tensor:
        ids = x.long()
        wrong = (ids != x) | (ids < 0) | (ids >= self.embedding.num_embeddings)
        if bool(wrong.any()):
            largest = self.embedding.num_embeddings - 1
            raise PerfedError(
                f"lstm: inputs must be token ids, whole numbers from 0 to vocabulary + 1 = {largest}; "
                f"found {float(x[wrong][0]):g}"
            )
        return ids


def _run_direction(layer: nn.Module, x: Tensor, direction: str) -> Tensor:
    """Return the outputs ``(batch, length, width)`` of one direction of an LSTM layer over ``x``."""
    weights = [getattr(layer, f"{name}_l0{direction}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    start = x.new_zeros(1, x.shape[0], weights[1].shape[1])
    outputs: Tensor = torch.lstm(x, (start, start), weights, True, 1, 0.0, False, False, True)[0]
    return outputs


def _move_padding_back(ids: Tensor, cut: bool = True) -> tuple[Tensor, Tensor]:
    """Return the token ids with padding moved to the end (and removed if ``cut``), and the length of each text, at
    least 1.
    """
    length = ids.shape[1]
    order = (length * (ids == PADDING).long() + torch.arange(length, device=ids.device)).argsort(dim=1)
    lengths = (ids != PADDING).sum(1).clamp_min(1)
    ids = ids.gather(1, order)
    return ids[:, : int(lengths.max())] if cut else ids, lengths
