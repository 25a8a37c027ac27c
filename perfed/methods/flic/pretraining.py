"""FLIC's alignment before the first round: what it needs, and for how long it helps."""

from __future__ import annotations

import torch
from torch import Tensor

from perfed.errors import PerfedError
from perfed.method.declared import FederationInfo
from perfed.methods.flic.classes import ClassAnchors
from perfed.methods.flic.line import LineAnchors
from perfed.model.chain import EMBEDDING, stage_of
from perfed.model.placement import own_embedding
from perfed.training.batches import IntArray
from perfed.training.cohort import Cohort
from perfed.training.early_stopping import best_epochs, hold_out


def validated_epochs(cohort: Cohort, anchors: ClassAnchors | LineAnchors, batch_size: int, limit: int) -> IntArray:
    """Epochs of alignment after which held-out samples of each client lie closest to their anchors, ``(n,)``.

    Args:
        cohort: its model stays as it is.
        anchors: to align with.
        batch_size: of the mini-batches.
        limit: most epochs.
    """
    kept, held = hold_out(cohort)
    kept, loss = anchors.divided(cohort, kept).in_batches(batch_size), anchors.alignment()
    trial = {name: tensor.clone() for name, tensor in cohort.model.items() if stage_of(name) == EMBEDDING}

    def train(epochs: int) -> None:
        cohort.fit(EMBEDDING, epochs=epochs, params=trial, samples=kept, loss=loss)

    def score() -> Tensor:
        total = held.x.new_zeros(cohort.n)
        for x, index, valid in cohort.windows(held):
            z = cohort.forward(x, stages=(EMBEDDING,), params=trial)
            total += (anchors.distances(z, held.y[index]) * valid).sum(1)
        return total / torch.from_numpy(held.counts).to(total)

    with cohort.rehearsal():
        return best_epochs(train, score, limit)


def check_embedding(info: FederationInfo) -> None:
    """What is aligned must be there, and personal.

    Raises:
        PerfedError: it is not; names the settings to add.
    """
    sent = [name for name in info.shared if stage_of(name) == EMBEDDING]
    own = any(stage_of(name) == EMBEDDING for name in info.personal)
    way = f"add {own_embedding(own or bool(sent))}"
    if sent:
        raise PerfedError(f"the anchors extension aligns personal embeddings, but '{sent[0]}' is shared; {way}")
    if not own:
        raise PerfedError(f"the anchors extension aligns personal embeddings, and this run has none; {way}")
