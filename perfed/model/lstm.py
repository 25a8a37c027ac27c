"""Texts as token ids: an embedding and bidirectional LSTM layers, a preset for the first stage of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from perfed.data.tokens import FIRST_WORD, PADDING
from perfed.errors import PerfedError
from perfed.model.chain import Shape, StageFactory
from perfed.model.presets import activation_layer
from perfed.model.word_vectors import read_vectors


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
    """Embedded tokens through bidirectional LSTM layers with dropout between them, then linear layers.

    Inputs are token ids ``(length,)``: 0 for padding, which changes no result wherever it stands (a text of nothing
    else counts as one token), 1 for unknown words, 2 and up for words. The LSTM's ``2 * width`` outputs are the last
    layer's states after the last token (forwards) and after the first one (backwards). Tziotis et al. 2023
    (appendix C) have ``lstm(10_000, 100, fc=(5,))`` with GloVe vectors.

    Args:
        vocabulary: number of words; ids are at most ``vocabulary + 1``.
        dimension: of the embedding.
        width: outputs of an LSTM layer in each direction.
        layers: number of LSTM layers.
        dropout: on the outputs of each LSTM layer but the last.
        fc: sizes of linear layers behind the LSTM, each followed by ``activation``.
        vectors: file of word vectors that the embedding starts from (:func:`perfed.model.word_vectors.read_vectors`);
            words that are not in it, and all without a file, start from normal ones. The embedding is trained like any
            other parameter; ``placement = { "*.embedding.weight" = "frozen" }`` keeps it.
        words: what the ids from 2 on stand for; the experiment's data say it.

    Raises:
        PerfedError: inputs that are no vectors of token ids, or more words than ``vocabulary``.
    """

    def build(shape: Shape) -> nn.Module:
        if len(shape) != 1:
            raise PerfedError(f"lstm needs token ids (length,), got inputs of shape {shape}")
        if len(words) > vocabulary:
            raise PerfedError(f"lstm: vocabulary = {vocabulary} is less than the {len(words)} words of the data")
        first = TextLSTM(vocabulary, dimension, width, layers, dropout)
        if vectors:
            found, values = read_vectors(vectors, tuple(words), dimension)
            first.embedding.weight.data[FIRST_WORD + torch.from_numpy(found)] = torch.from_numpy(values)
        rest: list[nn.Module] = []
        size = 2 * width
        for outputs in fc:
            rest += [nn.Linear(size, outputs), activation_layer(activation)]
            size = outputs
        return nn.Sequential(first, *rest)

    return build


class TextLSTM(nn.Module):
    """Token ids ``(batch, length)`` to the last states of both directions ``(batch, 2 * width)``."""

    def __init__(self, vocabulary: int, dimension: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(FIRST_WORD + vocabulary, dimension, padding_idx=PADDING)
        sizes = [dimension, *[2 * width] * (layers - 1)]
        self.layers = nn.ModuleList(nn.LSTM(size, width, batch_first=True, bidirectional=True) for size in sizes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``(batch, length)``, whole numbers of any type."""
        if torch.compiler.is_compiling():  # a graph has no packed sequences, and no checks of values
            return self._padded(*_to_the_front(x.long(), cut=False))
        ids, lengths = _to_the_front(self._token_ids(x))
        packed = pack_padded_sequence(self.embedding(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        last = torch.empty(0)
        for number, layer in enumerate(self.layers):
            if number > 0:
                packed = PackedSequence(self.dropout(packed.data), *packed[1:])
            packed, (last, _) = layer(packed)
        return last.transpose(0, 1).flatten(1)

    def _padded(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """The same in evaluation mode, in steps over padding that no token and no last state hears of."""
        steps, count = torch.arange(ids.shape[1], device=ids.device), lengths[:, None]
        turned = torch.where(steps < count, count - 1 - steps, steps)  # tokens from last to first, then padding
        x, ends = self.embedding(ids), (lengths - 1)[:, None, None]
        last = []
        for layer in self.layers:
            forwards = _one_way(layer, x, "")
            backwards = _one_way(layer, x.gather(1, turned[:, :, None].expand(-1, -1, x.shape[2])), "_reverse")
            last = [out.gather(1, ends.expand(-1, 1, out.shape[2])).squeeze(1) for out in (forwards, backwards)]
            x = torch.cat([forwards, backwards.gather(1, turned[:, :, None].expand_as(backwards))], 2)
        return torch.cat(last, 1)

    def _token_ids(self, x: Tensor) -> Tensor:
        ids = x.long()
        wrong = (ids != x) | (ids < 0) | (ids >= self.embedding.num_embeddings)
        if bool(wrong.any()):
            largest = self.embedding.num_embeddings - 1
            raise PerfedError(
                f"lstm: inputs must be token ids, whole numbers from 0 to vocabulary + 1 = {largest}; "
                f"found {float(x[wrong][0]):g}"
            )
        return ids


def _one_way(layer: nn.Module, x: Tensor, direction: str) -> Tensor:
    """Outputs ``(batch, length, width)`` of one direction of an LSTM layer, over ``x`` from front to back."""
    weights = [getattr(layer, f"{name}_l0{direction}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    start = x.new_zeros(1, x.shape[0], weights[1].shape[1])
    outputs: Tensor = torch.lstm(x, (start, start), weights, True, 1, 0.0, False, False, True)[0]
    return outputs


def _to_the_front(ids: Tensor, cut: bool = True) -> tuple[Tensor, Tensor]:
    """Tokens first, in their order, padding behind them and cut off; the number of tokens of each text, at least 1."""
    length = ids.shape[1]
    order = (length * (ids == PADDING).long() + torch.arange(length, device=ids.device)).argsort(dim=1)
    lengths = (ids != PADDING).sum(1).clamp_min(1)
    ids = ids.gather(1, order)
    return ids[:, : int(lengths.max())] if cut else ids, lengths
