"""What a run shows of itself while it goes on: the samples as the clients embed them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.engine.server import Server
from perfed.methods.flic.anchors import Anchors
from perfed.run.callback import Callback, Running
from perfed.run.callbacks.results import write_arrays
from perfed.run.settings import Snapshots


class EmbeddedSamples(Callback):
    """Keeps the watched clients' samples behind their own embeddings after the ``wanted`` rounds, in ``snapshots/``."""

    name = "snapshots"
    wanted: Snapshots

    def begin(self, run: Running) -> None:
        """Keep those of the start."""
        if run.done == 0:
            self._keep(run)

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Keep those of the round."""
        self._keep(run)
        return False

    def _keep(self, run: Running) -> None:
        if run.directory and run.done in self.wanted.rounds:
            arrays = embed_samples(run.server, self.wanted, run.done)
            write_arrays(run, {} if arrays is None else {"snapshots": arrays})


def embed_samples(server: Server, wanted: Snapshots, round_: int) -> dict[str, NDArray[Any]] | None:
    """Return the ``wanted`` clients' samples behind their own embeddings; clients with none in the split are left out.

    Returns:
        ``z`` ``(samples, k)``, ``y`` and ``client`` ``(samples,)``, and ``anchors`` ``(entries, k)`` where the method
        has some, with their classes ``anchor_class`` ``(entries,)`` unless entry c is that of class c; ``None`` for a
        model without an embedding, or without clients.
    """
    split = wanted.split
    ids = [i for i in server.federation.ids[: wanted.clients] if server.clients[i].split(split) is not None]
    if not ids or "embedding" not in server.model.factories:
        return None
    z, y, owner = [], [], []
    for cohort in server.own_models(ids, round_):
        samples = cohort.samples(split)
        z.append(cohort.features("embedding", split).flatten(1).cpu().numpy())
        y.append(samples.y.cpu().numpy())
        owner += [i for i, count in zip(cohort.ids, samples.counts, strict=True) for _ in range(count)]
    arrays = {"z": np.concatenate(z), "y": np.concatenate(y), "client": np.array(owner)}
    if "anchors" in server.sets:
        arrays["anchors"] = server.sets["anchors"]["mean"].cpu().numpy()
        classes, own = server.federation.num_classes, np.arange(len(arrays["anchors"]))
        for extension in server.method.extensions:
            if isinstance(extension, Anchors) and classes and (found := extension.classes(classes)) != own.tolist():
                arrays["anchor_class"] = np.array(found)
    return arrays
