"""Wikipedia articles: some clients have their images and others their texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from perfed.data.federation import Federation
from perfed.data.files import load_npz, require
from perfed.data.partition.shards import draw_classes, make_generator, share_among_holders
from perfed.datasets.catalogue import NonNegative, dataset, make_client_ids

FILE = "wiki_crossmodal.npz"
KINDS = ("image", "text")
_CLASSES = 10


@dataset("wiki-crossmodal", files=(FILE,))
def wiki_crossmodal(
    seed: int,
    data_dir: Path | None,
    *,
    clients: Annotated[int, Field(ge=2)] = 20,
    classes_per_client: Annotated[int, Field(ge=1, le=_CLASSES)] = 4,
    samples_per_client: NonNegative = 0,
    columns: Literal["own", "union"] = "own",
) -> Federation:
    """Topics of Wikipedia articles from either their image or their text (2,173 and 693 articles).

    A random half of the clients has images (128 features), and the other half texts (100 features); if the number is
    odd, one more client has texts. Each client has a few of the ten topics. The articles of a split are distributed by
    topic without overlap, so that no two clients have the image and the text of the same article. Features have mean 0
    and deviation 1 over the client's training samples, including samples that become validation data.
    ``samples_per_client``: the largest number of training samples, which are drawn at random; 0 for all.
    ``columns``: "own", or "union" for all 228 features, of which the missing ones are 0.
    ``notes["kind"]`` maps client id to "image" or "text".

    Source: Rasiwasia et al. 2010 (Wikipedia articles); the task is FLIC's section 5 (TextCaps) in kind.
    """
    data = load_npz(FILE, data_dir, [*KINDS, "y", "train_index", "test_index"])
    y = data["y"].astype(np.int64)
    for kind in KINDS:
        require(FILE, data[kind].dtype.kind == "f" and len(data[kind]) == len(y), f"'{kind}' must have a row per label")
    require(FILE, len(y) > 0 and y.min() >= 0 and y.max() < _CLASSES, f"'y' must hold labels in 0..{_CLASSES - 1}")
    classes = draw_classes(_CLASSES, clients, classes_per_client, seed=seed)
    parts = {}
    for split in ("train", "test"):
        index = data[f"{split}_index"].astype(np.int64)
        parts[split] = [index[part] for part in share_among_holders(y[index], classes, seed=seed)]
    from sklearn.preprocessing import StandardScaler

    kinds = [KINDS[k] for k in (make_generator(seed, "kinds").permutation(clients) >= clients // 2).astype(int)]
    arrays: dict[str, Any] = {}
    for i, client in enumerate(make_client_ids(clients)):
        train, test = parts["train"][i], parts["test"][i]
        if 0 < samples_per_client < len(train):
            rng = make_generator(seed, f"articles of {client}")
            train = np.sort(rng.choice(train, size=samples_per_client, replace=False))
        scaler = StandardScaler().fit(data[kinds[i]][train].astype(np.float64))
        arrays[client] = {}
        for split, rows in (("train", train), ("test", test)):
            features_by_kind = {kinds[i]: scaler.transform(data[kinds[i]][rows].astype(np.float64)).astype(np.float32)}
            if columns == "union":
                features_by_kind = {
                    kind: features_by_kind.get(kind, np.zeros((len(rows), data[kind].shape[1]), np.float32))
                    for kind in KINDS
                }
            arrays[client] |= {
                f"x_{split}": np.concatenate(list(features_by_kind.values()), axis=1),
                f"y_{split}": y[rows],
            }
    notes = {"kind": dict(zip(arrays, kinds, strict=True))}
    return replace(Federation.from_arrays(arrays, num_classes=_CLASSES), notes=notes)
