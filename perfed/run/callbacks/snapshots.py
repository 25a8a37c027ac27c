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
    """A callback that stores the embedded samples of some clients in ``snapshots/``, as its ``settings`` define."""

    name = "snapshots"
    settings: Snapshots

    def begin(self, run: Running) -> None:
        """Store the embedded samples before training."""
        if run.done == 0:
            self._store_samples(run)

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Store the embedded samples after the round."""
        self._store_samples(run)
        return False

    def _store_samples(self, run: Running) -> None:
        if run.directory and run.done in self.settings.rounds:
            arrays = embed_samples(run.server, self.settings, run.done)
            write_arrays(run, {} if arrays is None else {"snapshots": arrays})


def embed_samples(server: Server, settings: Snapshots, round_: int) -> dict[str, NDArray[Any]] | None:
    """Return the samples of the first clients as their own models embed them; clients without samples are left out.

    Returns:
        ``z`` ``(samples, k)``, ``y`` and ``client`` ``(samples,)``, and ``anchors`` ``(entries, k)`` where the method
        has some, with their classes ``anchor_class`` ``(entries,)`` unless entry c is that of class c; ``None`` for a
        model without an embedding, or without clients.
    """
    split = settings.split
    ids = [i for i in server.federation.ids[: settings.clients] if server.clients[i].split(split) is not None]
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
        num_classes, entries = server.federation.num_classes, list(range(len(arrays["anchors"])))
        for extension in server.method.extensions:
            if (
                isinstance(extension, Anchors)
                and num_classes
                and (classes := extension.classes(num_classes)) != entries
            ):
                arrays["anchor_class"] = np.array(classes)
    return arrays
