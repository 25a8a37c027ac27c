"""FedRep on inputs that every client has projected to one space by t-SNE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from perfed.data.client import SPLITS, Client, Split
from perfed.method.registry import register
from perfed.methods.fedrep import FedRep


@register("fedrep-tsne", title="FedRep-tSNE", differs="features")
class TSNEFedRep(FedRep):
    """FedRep on each client's t-SNE projection to R^64 (Rakotomamonjy et al. 2024, S3.7).

    t-SNE cannot project new samples, so a client projects all its splits together, without labels, by exact t-SNE with
    250 iterations from a random start, as the authors did. The perplexity is 20, but at most a third of the number of
    the other samples.
    """

    dimension: int = Field(64, ge=1, description="dimension of the projection")

    def local_data(self, client: Client, key: Tensor) -> Client:
        """Return the client with its samples projected."""
        from sklearn.manifold import TSNE

        splits = {name: split for name in SPLITS if (split := client.split(name)) is not None}
        x = torch.cat([split.x.flatten(1) for split in splits.values()]).double().numpy()
        projection = np.zeros((len(x), self.dimension))
        if len(x) > 1:
            tsne = TSNE(
                self.dimension,
                perplexity=min(20.0, (len(x) - 1) / 3),
                method="exact",
                init="random",
                max_iter=250,
                random_state=int(key) & 0x7FFFFFFF,
            )
            projection = tsne.fit_transform(x)
        parts = torch.from_numpy(projection).to(client.train.x.dtype).split([len(split) for split in splits.values()])
        projected: dict[str, Any] = {
            name: Split(part, splits[name].y, splits[name].domain, splits[name].group)
            for name, part in zip(splits, parts, strict=True)
        }
        return replace(client, **projected, feature_names=None, held=None)
