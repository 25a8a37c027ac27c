"""A deployment whose server sees sums alone: the study's table, what sites are told of it, cards of models."""

from __future__ import annotations

import pytest
from stations import Stations, same_as_simulated, study, submit

from perfed.deploy.own_model import site_model
from perfed.deploy.preview import Preview
from perfed.deploy.trial import entries_sent
from perfed.errors import PerfedError
from perfed.experiment.config import read, validate
from perfed.experiment.start import start
from perfed.run.card import card

DIGITS = {"method": "fedavg", "rounds": 2, "data": {"name": "digits", "clients": 4}, "model": {"head": "linear"}}


def test_sites_under_masks_end_where_a_simulation_ends(tables):
    text = study(tables, secure_aggregation={"threshold": 2})
    submit(tables, text, Stations(tables, text))
    same_as_simulated(tables, secure_aggregation={"threshold": 2})


def test_a_site_sees_beforehand_that_its_replies_leave_under_masks(tables):
    text = study(tables, secure_aggregation={})
    shown = Preview.of("north", tables / "north.csv", text)
    assert {entry["name"] for entry in shown.entries} == {"loss", "masked"}
    assert {"shared/body.0.weight", "extensions/anchors/mean x extensions/anchors/weight", ":loss"} <= {*shown.summed}
    entries = entries_sent(read(text, "the study"))
    assert "shared/body.0.weight" in entries and "num_samples" not in entries  # a plain mean, which needs no weights
    plain = Preview.of("north", tables / "north.csv", study(tables))
    assert not plain.summed and plain.digest != shown.digest


def test_a_method_that_needs_single_replies_is_refused_when_the_deployment_is_made(tables):
    body = {"kind": "hidden-layer", "out": 4}
    changes = {"method": "fedpac", "model": {"body": body, "head": "linear"}, "methods": {}}
    with pytest.raises(PerfedError, match="secure aggregation: the server has sums over clients alone") as error:
        entries_sent(read(study(tables, secure_aggregation={}, **changes), "the study"))
    assert "\n" not in str(error.value)


def test_a_simulation_refuses_it_before_anything_runs(tmp_path):
    table = {**DIGITS, "method": "fedamp", "secure_aggregation": {}}
    with pytest.raises(PerfedError, match="secure aggregation: the server has sums over clients alone"):
        start(validate(table), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"threshold": 1}, "secure_aggregation.threshold"),
        ({"bits": 60}, "secure_aggregation.bits"),
        ({"treshold": 3}, r"unknown key 'secure_aggregation.treshold' \(did you mean 'threshold'\?\)"),
        (3, "secure_aggregation"),
    ],
)
def test_a_table_that_says_something_else_is_refused_in_one_line(given, said):
    with pytest.raises(PerfedError, match=said) as error:
        validate({**DIGITS, "secure_aggregation": given})
    assert "\n" not in str(error.value)


def test_a_threshold_above_the_clients_of_a_round_is_refused():
    table = {**DIGITS, "secure_aggregation": {"threshold": 3}, "participation": {"rate": 0.5}}
    with pytest.raises(PerfedError, match="a round asks 2 of 4 clients, and a sum needs 3"):
        start(validate(table))


def test_a_simulation_under_masks_learns_as_without_them():
    secure, plain = (start(validate({**DIGITS, **more})) for more in ({"secure_aggregation": {}}, {}))
    assert secure.execute()["accuracy"] == plain.execute()["accuracy"]


def test_the_card_of_a_model_lists_the_sites_that_contributed(tables):
    run = start(validate(DIGITS))
    run.execute()
    text = card(run.site("000").facts)
    assert "## Sites that contributed" in text and "| 003 | 2 |" in text
    text = study(tables)
    submit(tables, text, Stations(tables, text))
    facts = site_model(tables / "at-north", "north", tables / "north.csv").facts
    assert [*facts["contributors"]] == ["north", "south", "west"]
    assert "| south | not known here |" in card(facts)
