"""``perfed list`` and ``perfed show``: grouped, complete, and with commands that work."""

from __future__ import annotations

import re
import shlex

import pytest
from command_line import perfed

from perfed.cli.index import index
from perfed.cli.list_commands import DIFFERENCES
from perfed.experiment.comparison import ComparisonSpec, federated
from perfed.experiment.config import find_experiment
from perfed.experiment.overrides import override
from perfed.experiment.planned import parse_names

TITLES = {item["title"]: item["name"] for item in index()["methods"]}


def test_methods_are_in_groups_by_what_differs_and_in_them_by_paper():
    groups: dict[str, dict[str, set[str]]] = {}
    own: dict[str, set[str]] = {}
    differs = paper = ""
    for line in perfed("list", "methods").out.splitlines():
        title = line.split(" ")[4] if re.match(r" {4}\S", line) else None
        if title in TITLES:
            own.setdefault(paper, set()).add(TITLES[title])
        elif re.match(r" {2}\S", line):
            own, paper = groups[differs], line.strip()
        elif (head := line.partition(":")[0]) in DIFFERENCES:
            differs = head
            groups[differs] = {}
    assert list(groups) == list(DIFFERENCES)
    found = [name for by in groups.values() for names in by.values() for name in names]
    assert sorted(found) == sorted(item["name"] for item in index()["methods"])
    assert {"flic-class", "flic-hl", "hetfedrep", "fedrep-tsne"} == groups["features"]["Rakotomamonjy et al. 2024"]
    assert "fedpac" in groups["labels"]["Xu et al. 2023"] and "fedavg" in groups["nothing"]["McMahan et al. 2017"]
    flanp = {"flanp", "flanp-ft", "flanp-fedgate"}
    assert set().union(*groups["speeds"].values()) == {"fedrep-srpfl", "lg-srpfl", *flanp}
    needing = {item["name"] for item in index()["methods"] if "the domain of every sample" in item["needs"]}
    assert set().union(*groups["domains"].values()) == needing and "feddar-sa" in needing


def test_a_method_is_shown_with_paper_settings_needs_and_a_command():
    said = perfed("show", "fedpac").said
    assert "paper: Xu et al. 2023, Algorithm 1" in said and "needs: class labels" in said
    assert "perfed compare digits-label-skew --methods local,fedpac" in said
    (item,) = [item for item in index()["methods"] if item["name"] == "fedpac"]
    for name, about in item["settings"].items():
        assert re.search(rf"\b{name} = ", said) and " ".join(about["description"].replace("``", "").split()) in said
        assert about["allowed"] in said and "class '" not in about["allowed"]
    assert "batch_size = 100 (integer >= 1)" in said


def test_a_setting_has_the_default_that_the_method_has():
    (item,) = [item for item in index()["methods"] if item["name"] == "fedpac-fa"]
    assert item["settings"]["collaboration"]["default"] is False


def test_a_data_set_and_an_experiment_of_one_name_are_both_shown():
    said = perfed("show", "heart-disease").out
    assert "heart-disease (data set): " in said and "heart-disease (experiment): " in said
    assert "needs: heart_disease.npz" in said and "perfed compare heart-disease --methods local,flic-hl" in said


@pytest.mark.parametrize(
    ("given", "offered"),
    [("fedpak", "fedpac"), ("heart", "heart-disease"), ("srpfl-tweet", "srpfl-tweets"), ("mnistt", "mnist")],
)
def test_an_unknown_name_offers_the_nearest(given, offered):
    result = perfed("show", given)
    assert result.code == 2 and f"nothing is called '{given}'" in result.err and offered in result.err
    assert result.err.count("\n") == 1


@pytest.mark.long
def test_the_commands_to_try_start():
    """Those of all methods: every one is built on its experiment's data, a few at a time."""
    tried: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for item in index()["methods"]:
        program, command, experiment, *rest = shlex.split(item["try"])
        assert (program, command) == ("perfed", "compare")
        at = rest.index("--methods")
        settings = tuple(word for word in (*rest[:at], *rest[at + 2 :]))
        names = tried.setdefault((experiment, settings), [])
        names += [name for name in rest[at + 1].split(",") if name not in names]
    for (experiment, settings), names in tried.items():
        parse_names(",".join(names), baselines=True)
        table = override(find_experiment(experiment), [*settings, "data.clients=4"], federated(names))
        ComparisonSpec(table, names, [0]).check_starts(0)
