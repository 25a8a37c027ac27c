"""Each split is checked once, each array and column parsed once, holdings counted once, whatever way data come in."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import TensorDataset

from perfed.data import checks, federation, lazy, site_arrays
from perfed.data.client import SPLITS, Client, Split
from perfed.data.domain_input import apply_common_options
from perfed.data.federation import Federation, federation_of
from perfed.data.new_client import new_client
from perfed.errors import PerfedError
from perfed.run.callbacks.results import describe_holdings
from perfed.tables import kinds
from perfed.tables.agreement import agree_on_schema
from perfed.tables.joining import new_client_from_frame
from perfed.tables.site_data import read_site_data

SITES = ("north", "south", "west")


@pytest.fixture
def count(monkeypatch) -> Counter[str]:
    """How often samples are looked at, arrays and columns parsed, and labels or domains counted, from here on."""
    counted: Counter[str] = Counter()

    def follow(place, name, what):
        real = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *given, **more: counted.update([what]) or real(*given, **more))

    follow(checks, "check_samples", "checked")
    follow(lazy, "check_samples", "checked")
    follow(site_arrays, "arrays_of", "parsed")
    follow(federation, "arrays_of", "parsed")
    follow(kinds, "parse_cells", "columns")
    follow(torch, "bincount", "counted")
    return counted


def arrays(seed: int, splits=SPLITS, values=False) -> dict[str, np.ndarray]:
    rng, made = np.random.default_rng(seed), {}
    for split in splits:
        made |= {f"x_{split}": rng.normal(size=(12, 4)), f"domain_{split}": rng.integers(0, 2, 12)}
        made[f"y_{split}"] = rng.normal(size=12) if values else np.arange(12) % 3
    return made


def three(**more) -> dict[str, dict[str, np.ndarray]]:
    return {name: arrays(seed, **more) for seed, name in enumerate(SITES)}


def frame(seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    columns = {"age": rng.normal(60, 9, 40), "sex": ["f", "m"] * 20, "race": ["a", "a", "b", "b"] * 10}
    return pd.DataFrame({**columns, "sick": ["no", "yes", "yes", "no"] * 10})


def used(made: Federation) -> None:
    """All that a run asks of a federation before its first round, and its report after the last."""
    ready = made.to(dtype=torch.float32)
    describe_holdings(ready)
    ready.describe()
    assert [client.facts(ready.survival) for client in ready] and ready.domains_in("test")
    assert replace(ready, name="other").schema == made.schema


def test_arrays(count):
    made = Federation.from_arrays(three())
    used(made)
    assert count == {"parsed": 3, "checked": 9}
    used(replace(made, clients=(*made.clients, new_client(made, "east", arrays(7)))))
    assert count == {"parsed": 4, "checked": 12}  # the others are as they were


def test_validation_data_domains_as_inputs_and_scaled_targets(count):
    made = apply_common_options(Federation.from_arrays(three(splits=("train", "test"))), 0.25, True, 0)
    used(made)
    assert count == {"parsed": 3, "checked": 6, "counted": 12}  # of training samples two parts have been made
    used(Federation.from_arrays(three(values=True)).standardised())
    assert count["parsed"] == 6 and count["checked"] == 15


def test_samples_that_are_read_when_they_are_used(count, tmp_path):
    made = Federation.from_source(three().__getitem__, SITES)
    used(made)
    assert count == {"parsed": 3}
    for name in SPLITS:
        made.clients[0].split(name).loaded()
    assert count == {"parsed": 6, "checked": 3, "counted": 6}  # and compared with what was seen before
    for name, given in three().items():
        np.savez(tmp_path / f"{name}.npz", **given)
    count.clear()
    used(Federation.from_folder(tmp_path))
    assert count == {"parsed": 3}


@pytest.mark.parametrize("kind", ["arrays", "tables"])
def test_sites_of_their_own(count, tmp_path, kind):
    from perfed.tables.options import TableOptions

    options = TableOptions("sick", domain="race", columns="common") if kind == "tables" else None
    for seed, (name, given) in enumerate(three().items()):
        if options is None:
            np.savez(tmp_path / f"{name}.npz", **given)
        else:
            frame(seed).to_csv(tmp_path / f"{name}.csv", index=False)
    ending = "npz" if options is None else "csv"
    sites = {name: read_site_data(name, tmp_path / f"{name}.{ending}", options) for name in SITES}
    schema = agree_on_schema({name: site.create_metadata() for name, site in sites.items()}, options)
    assert not any(site.describe_misfits(schema) for site in sites.values()) or options is None
    for site in sites.values():
        used(federation_of([site.client(schema)], schema))
    if options is None:
        assert count["parsed"] == 3
    else:
        assert count == {"columns": 12, "parsed": 3, "checked": 6}


@pytest.mark.parametrize("columns", ["own", "common", "union"])
def test_tables(count, columns):
    made = Federation.from_frames(
        {name: frame(seed) for seed, name in enumerate(SITES)}, target="sick", domain="race", columns=columns
    )
    used(made)
    assert count == {"columns": 12, "parsed": 3, "checked": 6}
    west = new_client_from_frame(made, "east", frame(9), "east.csv")
    used(replace(made, clients=(*made.clients, west)))
    assert count["checked"] == 8 and count["columns"] <= 18  # of columns of its own it guesses the kinds beforehand


def test_a_client_joins_by_the_schema(count):
    made = Federation.from_arrays(three())
    assert (made.schema.task, made.schema.classes, made.schema.domains) == ("classification", (0, 1, 2), 2)
    with pytest.raises(PerfedError, match="client 'east': train domain id 5 is not allowed; ids are from 0 to 1"):
        new_client(made, "east", {**arrays(7), "domain_train": np.full(12, 5)})
    with pytest.raises(PerfedError, match="client 'east': train samples are without domain ids, and others have them"):
        new_client(made, "east", {"x": np.ones((4, 4)), "y": [0, 1, 2, 0]})
    values = Federation.from_arrays(three(values=True)).standardised()
    east = new_client(values, "east", arrays(7, values=True))
    torch.testing.assert_close(
        values.target_scale.up(east.train.y), torch.from_numpy(arrays(7, values=True)["y_train"])
    )


def test_pairs_of_data_sets_are_what_their_arrays_are():
    given = three(splits=("train", "test"))

    def samples(held, split):
        return TensorDataset(*(torch.from_numpy(held[f"{part}_{split}"]) for part in ("x", "y", "domain")))

    sets = {name: (samples(held, "train"), samples(held, "test")) for name, held in given.items()}
    made, expected = Federation.from_datasets(sets, num_classes=3), Federation.from_arrays(given)
    assert made.schema == expected.schema
    for one, two in zip(made, expected, strict=True):
        assert torch.equal(one.test.x, two.test.x) and torch.equal(one.train.y, two.train.y)
    with pytest.raises(PerfedError, match=r"client 'north' is a TensorDataset; \(train, test\) is needed"):
        Federation.from_datasets({"north": sets["north"][0]})


def test_what_does_not_keep_samples_sound_is_checked_again():
    sound = Federation.from_arrays({"a": {"x_train": np.array([[1e300], [0.0]]), "y_train": [0, 1]}})
    with pytest.raises(PerfedError, match="client 'a': train inputs hold NaN or infinity in column 0, row 0"):
        sound.to(dtype=torch.float32)
    split = sound.clients[0].train
    bad = replace(split, x=torch.full((2, 1), torch.nan, dtype=torch.float64))
    with pytest.raises(PerfedError, match="client 'a': train inputs hold NaN"):
        replace(sound, clients=(Client("a", bad),))
    with pytest.raises(PerfedError, match="client 'a': train label 7 is outside the classes"):
        replace(sound, clients=(Client("a", replace(split, y=torch.tensor([0, 7]))),))
    assert Split(split.x, split.y).sound is False and split.take(torch.tensor([1])).sound


@pytest.mark.parametrize(
    "make",
    [
        lambda **more: Federation.from_arrays(three(), **more),
        lambda **more: Federation.from_source(three().__getitem__, SITES, **more),
        lambda **more: Federation.from_folder(".", **more),
        lambda **more: Federation.from_datasets({}, **more),
    ],
)
def test_an_argument_that_there_is_not_is_refused(make):
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'num_clases' \(did you mean 'num_classes'\?\)"):
        make(num_clases=3)
