"""A deployment whose server sees sums alone: the study's table, what sites are told of it, cards of models."""

from __future__ import annotations

import shutil
import tomllib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import perfed
from stations import Stations, answer_all, same_as_simulated, study, submit

from perfed.client_model.card import card
from perfed.errors import PerfedError
from perfed.experiment.config import read, validate
from perfed.experiment.start import start
from perfed.sites.deploy.deployment import Deployment
from perfed.sites.deploy.own_model import load_site_model
from perfed.sites.deploy.part import hash_study
from perfed.sites.deploy.preview import Preview
from perfed.sites.deploy.site_agent import SiteSettings, check_site
from perfed.sites.deploy.trial import list_sent_entries
from perfed.sites.deploy.write import deploy
from perfed.sites.flower.probe import ServerAddress
from perfed.sites.flower.signing import SigningKey

DIGITS = {"method": "fedavg", "rounds": 2, "data": {"name": "digits", "clients": 4}, "model": {"head": "linear"}}


@pytest.mark.long
def test_sites_under_masks_end_where_a_simulation_ends(tables):
    text = study(tables, secure_aggregation={"threshold": 2})
    submit(tables, text, Stations(tables, text))
    same_as_simulated(tables, secure_aggregation={"threshold": 2})


def site_keys(path: Path) -> dict[str, str]:
    return {site: SigningKey.in_folder(path / f"at-{site}").public_key for site in ("north", "south", "west")}


@pytest.mark.long
def test_sites_that_check_each_others_keys_end_where_a_simulation_ends(tables):
    text = study(tables, secure_aggregation={"threshold": 2, "keys": site_keys(tables)})
    submit(tables, text, Stations(tables, text))
    same_as_simulated(tables, secure_aggregation={"threshold": 2})


def test_sites_remember_the_sums_of_a_study_after_a_key_was_rotated(tables):
    """With new notes, a second sum of the first payload, of fewer sites, would show the reply of the others."""
    rotated = SigningKey(b"another".ljust(32, b"-")).public_key
    keys = {name: SigningKey(name.encode().ljust(32, b"-")).public_key for name in ("north", "south", "west")}

    def hash_with(keys: dict[str, str], **changes: object) -> str:
        return hash_study(study(tables, secure_aggregation={"threshold": 2, "keys": keys}, **changes))

    assert hash_with({**keys, "west": rotated}) == hash_with(keys)
    assert hash_with(keys, seed=1) != hash_with(keys)


@pytest.mark.long
def test_a_site_without_the_notes_on_its_sums_does_not_start(tables):
    text = study(tables, secure_aggregation={"threshold": 2})
    submit(tables, text, Stations(tables, text))
    settings = SiteSettings("north", tables / "north.csv", ServerAddress("127.0.0.1:1"), tables / "at-north", text)
    check_site(settings)
    shutil.rmtree(tables / "at-north" / "runs" / ".sums")
    with pytest.raises(PerfedError, match=r"\.sums is missing, .* restore the folder, or move those of earlier runs"):
        check_site(settings)


def test_a_site_whose_key_the_study_does_not_have_joins_no_run(tables):
    """Its folder was lost, and with it the key."""
    text = study(tables, secure_aggregation={"threshold": 2, "keys": site_keys(tables)})
    shutil.rmtree(tables / "at-west")
    lines = list[str]()
    with closing(Stations(tables, text, note=lines.append)) as stations, pytest.raises(PerfedError):
        answer_all(tables, text, stations)
    assert any("secure_aggregation.keys.west of the study is" in line for line in lines)
    settings = SiteSettings("west", tables / "west.csv", ServerAddress("127.0.0.1:1"), tables / "at-west", text)
    with pytest.raises(PerfedError, match=r"secure_aggregation.keys.west of the study is [0-9a-f]{64}, and the key of"):
        check_site(settings)
    check_site(replace(settings, name="north", data=tables / "north.csv", folder=tables / "at-north"))


def test_a_deployment_needs_the_key_of_each_of_its_sites_and_of_nobody_else(tables):
    keys = site_keys(tables)
    for changed, said in (
        ({k: v for k, v in keys.items() if k != "south"}, "secure_aggregation.keys lacks south"),
        ({**keys, "east": "0" * 64}, "secure_aggregation.keys has unknown east"),
    ):
        with pytest.raises(PerfedError, match=said):
            study(tables, secure_aggregation={"keys": changed})


def test_a_site_prints_its_key_as_a_line_of_the_table(tmp_path):
    folder = tmp_path / "at-north"
    line = perfed("site", "key", "--name", "north sea", "--dir", folder).out
    assert tomllib.loads(line) == {"north sea": SigningKey.in_folder(folder).public_key}
    assert perfed("site", "key", "--name", "north sea", "--dir", folder).out == line
    file = folder / "signing.key"
    assert file.stat().st_mode & 0o077 == 0
    file.chmod(0o644)
    done = perfed("site", "key", "--name", "north", "--dir", folder)
    assert done.code == 2 and "chmod 600" in done.err
    file.chmod(0o600)
    file.write_bytes(b"short")
    done = perfed("site", "key", "--name", "north", "--dir", folder)
    assert done.code == 2 and "signing.key is damaged: 5 bytes" in done.err


@pytest.mark.long
@pytest.mark.parametrize("known", [True, False])
def test_page_and_preview_say_whom_masks_protect_against(known, tables):
    keys = site_keys(tables)
    text = study(tables, secure_aggregation={"keys": keys} if known else {})
    (tables / "study.toml").write_text(text)
    options = ("--data", tables / "north.csv", "--study", tables / "study.toml", "--name", "north")
    shown = perfed("site", "preview", *options)
    deploy(read(text, "the study"), Deployment("study", (*keys,), "/srv/study"), tables / "deployment")
    page = (tables / "deployment/sites/north/README.md").read_text()
    for said in (shown.out, page):
        assert (keys["north"] in said) is known
        assert ("no keys of the sites" in said) is not known


@pytest.mark.long
def test_a_site_sees_beforehand_that_its_replies_leave_under_masks(tables):
    text = study(tables, secure_aggregation={})
    shown = Preview.of("north", tables / "north.csv", text)
    assert {entry["name"] for entry in shown.entries} == {"loss", "masked"}
    assert {"shared/body.0.weight", "extensions/anchors/mean x extensions/anchors/weight", ":loss"} <= {*shown.summed}
    entries = list_sent_entries(read(text, "the study"))
    assert "shared/body.0.weight" in entries and "num_samples" not in entries  # a plain mean, which needs no weights
    plain = Preview.of("north", tables / "north.csv", study(tables))
    assert not plain.summed and plain.digest != shown.digest


def test_a_method_that_needs_single_replies_is_refused_when_the_deployment_is_made(tables):
    body = {"kind": "hidden-layer", "out": 4}
    changes = {"method": "fedpac", "model": {"body": body, "head": "linear"}, "methods": {}}
    with pytest.raises(PerfedError, match="secure aggregation: the server has sums over clients alone") as error:
        list_sent_entries(read(study(tables, secure_aggregation={}, **changes), "the study"))
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
        ({"keys": {"a": "0" * 63}}, "secure_aggregation.keys: the key of site 'a' is '0"),
        ({"keys": {"a": "x" * 64}}, "64 digits of 'perfed site key' are needed"),
        ({"keys": {"a": 5}}, "secure_aggregation.keys"),
        ({"keys": {"a": "0" * 64, "b": "0" * 64}}, "secure_aggregation.keys: two sites have the same key"),
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


@pytest.mark.long
def test_the_card_of_a_model_lists_the_sites_that_contributed(tables):
    run = start(validate(DIGITS))
    run.execute()
    text = card(run.site("000").facts)
    assert "## Sites that contributed" in text and "| 003 | 2 |" in text
    text = study(tables)
    submit(tables, text, Stations(tables, text))
    facts = load_site_model(tables / "at-north", "north", tables / "north.csv").facts
    assert [*facts["contributors"]] == ["north", "south", "west"]
    assert "| south | not known here |" in card(facts)
