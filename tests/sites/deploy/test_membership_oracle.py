"""A curious server sends weights that overflow at one row, to ask by the kind of the reply whether the row is there."""

from __future__ import annotations

from contextlib import closing

import pandas as pd
import pytest
import torch
from stations import answer_all, study
from test_noise_binding import PRIVATE, Recorder, replies_of

from perfed.sites.flower.message import pack, unpack
from perfed.tree import map_leaves


@pytest.mark.long
@pytest.mark.parametrize("unit", ["sample", "client"])
def test_weights_that_overflow_at_one_row_get_the_same_kind_of_reply_with_the_row_and_without(unit, tables):
    """The oracle of a curious server: one exchange with crafted weights asked whether a row is there."""
    table = pd.read_csv(tables / "north.csv")
    kinds = []
    for row in (-5.9, 0.1):  # the only row with a large value, and an ordinary one
        table.loc[:, "age"] = table["age"].clip(-0.5, 0.5)
        table.loc[4, "age"] = row
        table.to_csv(tables / "north.csv", index=False)
        method = {"method": "fedrep", "methods": {"fedrep": {"placement": {"embedding": "personal"}}}}
        privacy = {"unit": unit, "epsilon": 0.2, "delta": 1e-3}
        text = study(tables, **{**PRIVATE, **method, "privacy": privacy})
        stations = Recorder(tables, text)
        with closing(stations):
            answer_all(tables, text, stations, f"run{row}")
        work = [data for data in stations.asked if unpack(data)[0]["kind"] == "work"]
        crafted = []
        for data in work:
            header, tree = unpack(data)
            changed = {name: torch.full_like(tensor, 3e38) for name, tensor in tree["shared"]["shared"].items()}
            crafted.append(pack(header, {**tree, "shared": {**tree["shared"], "shared": changed}}))
        other = tables / f"oracle{row}"
        other.mkdir()
        for site in ("north", "south", "west"):
            (other / f"{site}.csv").write_bytes((tables / f"{site}.csv").read_bytes())
        opening = [data for data in stations.asked if unpack(data)[0]["kind"] != "work"]
        replies = replies_of(other, text, *opening, *crafted)
        kinds.append([(reply["kind"], reply.get("error")) for reply in replies])
    assert kinds[0] == kinds[1]
    assert sum(kind == "done" for kind, _ in kinds[0]) >= 3


@pytest.mark.long
@pytest.mark.parametrize("distance", ["w2", "mixture", "mmd"])
def test_anchors_with_which_features_overflow_get_the_same_kind_of_reply_as_any_other(distance, tables):
    """Some distances of FLIC factorise matrices of a client's features, or end where features are not finite."""
    flic = {
        "method": "flic-hl",
        "methods": {"flic-hl": {"distance": distance}},
        "privacy": {"unit": "client", "noise": 3.0, "delta": 1e-3},
    }
    text = study(tables, **{**PRIVATE, **flic})
    stations = Recorder(tables, text)
    with closing(stations):
        answer_all(tables, text, stations)
    crafted = []
    for header, tree in map(unpack, stations.asked):
        if header["kind"] == "work":
            tree = map_leaves(tree, lambda _, tensor: torch.full_like(tensor, 3e38))
        crafted.append(pack(header, tree))
    folder = tables / "oracle"
    folder.mkdir()
    (folder / "north.csv").write_bytes((tables / "north.csv").read_bytes())
    assert [reply.get("error") for reply in replies_of(folder, text, *crafted)] == [None] * len(crafted)
