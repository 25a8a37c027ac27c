"""UCI Adult: incomes, with race or sex as the domain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from perfed.data.client import SPLITS, Client, Split
from perfed.data.federation import Federation
from perfed.data.files import load_npz, require
from perfed.data.partition.shards import make_generator
from perfed.datasets.catalogue import dataset
from perfed.datasets.options import PartitionOptions, change_defaults
from perfed.datasets.pool import Pool
from perfed.datasets.pooled import partition_pool

FILE = "adult.npz"
Share = Annotated[float, Field(ge=0, lt=1)]


@dataset("adult", files=(FILE,), shared=change_defaults(partition="domain-mixed"))
def adult(
    seed: int,
    data_dir: Path | None,
    *,
    domain: Literal["race", "sex"] = "race",
    missing: Share = 0.0,
    **partition: Any,
) -> Federation:
    """Whether income is above 50,000 dollars (UCI Adult, 32,561 and 16,281), race or sex as domains mixed at clients.

    Inputs are vectors: 6 numbers with mean 0 and deviation 1 over the training samples of all clients (sums that
    clients can add up without showing a sample), and the one-hot values of 7 categories; the ``domain`` itself is not
    among them (``domain_input`` adds it). Features have names: ``age``, ``occupation=Sales``.
    ``missing``: the share of these 13 columns that a client lacks, drawn for each client; inputs of clients then
    differ in length. Further options are those of :class:`perfed.datasets.options.PartitionOptions`.

    Source: Kohavi 1996; UCI Machine Learning Repository.
    """
    pool, numbers, categories = _read_pool(data_dir, domain)
    federation = partition_pool(pool, PartitionOptions.model_construct(**partition), seed)
    encoder = _make_encoder(len(numbers), [len(values) for values in categories.values()])
    encoder.fit(np.concatenate([client.train.x.numpy() for client in federation]))
    features_of_column = [[name] for name in numbers]
    features_of_column += [[f"{name}={value}" for value in values] for name, values in categories.items()]
    column = np.repeat(np.arange(len(features_of_column)), [len(names) for names in features_of_column])
    features = np.concatenate(features_of_column)
    num_missing = min(round(missing * len(features_of_column)), len(features_of_column) - 1)

    def encode_client(client: Client) -> Client:
        order = make_generator(seed, f"missing columns of {client.id}").permutation(len(features_of_column))
        has_column = ~np.isin(column, order[:num_missing])

        def encode_split(split: Split | None) -> Split | None:
            if split is None or len(split) == 0:
                return None
            return replace(
                split, x=torch.from_numpy(encoder.transform(split.x.numpy())[:, has_column].astype(np.float32))
            )

        splits = {name: encode_split(getattr(client, name)) for name in SPLITS}
        return replace(client, feature_names=tuple(features[has_column].tolist()), **splits)  # type: ignore[arg-type]

    return replace(federation, clients=tuple(encode_client(client) for client in federation), scaled_inputs=True)


def _make_encoder(num_numbers: int, num_values: list[int]) -> Any:
    """Return a transformer that standardises numbers and encodes codes one-hot, with all possible values of a
    category.
    """
    from sklearn.compose import ColumnTransformer
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    one_hot = OneHotEncoder(categories=[np.arange(number) for number in num_values], sparse_output=False)
    places = np.arange(num_numbers + len(num_values))
    return ColumnTransformer(
        [("numbers", StandardScaler(), places[:num_numbers]), ("categories", one_hot, places[num_numbers:])]
    )


def _read_pool(data_dir: Path | None, domain: str) -> tuple[Pool, list[str], dict[str, list[str]]]:
    """Return the pool with numbers and category codes, the names of the numbers, and the values of each category."""
    names = load_npz(FILE, data_dir, ["num_names", "cat_names"])
    numbers, all_names = names["num_names"].tolist(), names["cat_names"].tolist()
    require(FILE, domain in all_names, f"'cat_names' does not hold '{domain}'")
    parts = [f"{part}_{split}" for split in ("train", "test") for part in ("num", "cat", "y")]
    data = load_npz(FILE, data_dir, [*parts, *(f"categories_{name}" for name in all_names)])
    values = {name: data[f"categories_{name}"].tolist() for name in all_names}
    place = all_names.index(domain)
    fields: dict[str, Any] = {}
    for split in ("train", "test"):
        num, cat, y = (data[f"{part}_{split}"] for part in ("num", "cat", "y"))
        kinds = np.issubdtype(num.dtype, np.number) and np.issubdtype(cat.dtype, np.integer)
        require(FILE, kinds, f"'num_{split}' must hold numbers and 'cat_{split}' integers")
        good = len(y) > 0 and num.shape == (len(y), len(numbers)) and cat.shape == (len(y), len(all_names))
        require(FILE, good, f"'num_{split}', 'cat_{split}' and 'y_{split}' do not fit each other and the names")
        good = cat.min() >= 0 and bool((cat.max(axis=0) < [len(v) for v in values.values()]).all())
        require(FILE, good, f"'cat_{split}' must hold positions in 'categories_NAME'")
        require(FILE, set(np.unique(y)) <= {0, 1}, f"'y_{split}' must hold 0 and 1")
        fields[f"x_{split}"] = np.concatenate([num, np.delete(cat, place, axis=1)], axis=1).astype(np.float32)
        fields[f"y_{split}"] = y.astype(np.int64)
        fields[f"domain_{split}"] = cat[:, place].astype(np.int64)
    domain_names = tuple(values.pop(domain))
    pool = Pool(**fields, num_classes=2, class_names=("<=50K", ">50K"), domain_names=domain_names)
    return pool, numbers, values
