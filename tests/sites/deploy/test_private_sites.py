"""Differential privacy at real sites: secrets, what does not leave, what is counted and refused, over messages."""

from __future__ import annotations

import json
import re
import shutil
import stat
from contextlib import closing
from pathlib import Path

import pytest
import torch
from gaussian import closed_form
from stations import PUBLIC, Stations, answer_all, secrets_of, study, submit, tensors, wiped

from perfed.client_model.card import card
from perfed.errors import PerfedError
from perfed.experiment.config import validate
from perfed.sites.deploy.own_model import load_site_model
from perfed.sites.deploy.policy import Policy
from perfed.sites.deploy.preview import Preview
from perfed.sites.deploy.site_agent import SiteSettings, check_site
from perfed.sites.deploy.spending import (
    LEDGER,
    SECRET,
    LedgerLine,
    compute_ledger_epsilon,
    load_or_create_secret,
    read_ledger,
)
from perfed.sites.deploy.study import make_deployed_study
from perfed.sites.flower.message import pack, unpack
from perfed.sites.flower.probe import ServerAddress
from perfed.sites.flower.refusal import RefusalReason
from perfed.sites.flower.site import METRICS

ROWS = {"privacy": {"epsilon": 6.0, "delta": 1e-3}}
CLIENTS = {"privacy": {"unit": "client", "epsilon": 6.0, "delta": 1e-3}}
QUICK = {
    "method": "fedrep",
    "methods": {"fedrep": {"placement": {"embedding": "personal"}}},
    "rounds": 3,
    "training": {"lr": 0.1, "local_epochs": 1, "batch_size": 16, "optimizer": "sgd"},
}


def quick(path: Path, privacy: dict, **changes: object) -> str:
    return study(path, **{**QUICK, **privacy, **changes})


def replies(stations: Stations, site: str, program: str = "train") -> list[dict]:
    found = [unpack(reply) for reply in stations.left[site]]
    return [tree["reply"]["shared"] for header, tree in found if header.get("program") == program]


@pytest.mark.long
@pytest.mark.parametrize("privacy", [ROWS, CLIENTS], ids=["rows", "clients"])
def test_noise_is_of_a_secret_and_a_run_that_was_interrupted_has_the_same(privacy, tables):
    """Of one seed: with other secrets other numbers, with the same the same bits, also where the run was cut."""
    text = quick(tables, privacy)
    submit(tables, text, Stations(tables, text))
    first, secrets = tensors(tables / "run"), secrets_of(tables)
    assert len({*secrets.values()}) == len(secrets) >= 3 and all(len(secret) == 32 for secret in secrets.values())
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in secrets)
    wiped(tables, {})
    submit(tables, text, Stations(tables, text))
    others = tensors(tables / "run")
    assert not any(torch.equal(first[name], others[name]) for name in first if name.startswith("shared"))
    wiped(tables, secrets)
    stations = Stations(tables, text)
    stations.stop_after = 5
    with closing(stations), pytest.raises(KeyboardInterrupt):
        answer_all(tables, text, stations)
    submit(tables, text, Stations(tables, text))
    again = tensors(tables / "run")
    assert again.keys() == first.keys() and all(torch.equal(first[name], again[name]) for name in first)
    (line,) = read_ledger(tables / "at-north")
    assert sum(name.isdecimal() for name in line.releases) == 3  # and each round is counted once


@pytest.mark.long
def test_sites_with_the_same_rows_send_different_numbers(tables):
    """And what they send is in no folder or log of theirs a secret."""
    for site in ("south", "west"):
        shutil.copy(tables / "north.csv", tables / f"{site}.csv")
    known = {name: PUBLIC[name] for name in ("ill", "age", "sugar")}
    text = quick(tables, {"privacy": {"epsilon": 1.0, "delta": 1e-3}}, known=known)
    sent = submit(tables, text, Stations(tables, text))
    (north, *_), (south, *_) = replies(sent, "north"), replies(sent, "south")
    assert not any(torch.equal(north[name], south[name]) for name in north)
    for file, secret in secrets_of(tables).items():
        told = b"".join(sent.left[file.parents[2].name.removeprefix("at-")])
        logs = (file.parents[2] / "outgoing.jsonl").read_bytes()
        assert secret not in told and secret.hex().encode() not in told + logs


@pytest.mark.long
def test_no_loss_metric_count_or_checksum_of_rows_leaves_and_the_site_keeps_its_metrics(tables):
    text = quick(tables, ROWS)
    sent = submit(tables, text, Stations(tables, text))
    found = [unpack(reply) for reply in sent.left["north"]]
    work = [(header, tree) for header, tree in found if header["kind"] == "done"]
    assert work and all(header["metrics"] is None and tree["loss"].isnan() for header, tree in work)
    facts = next(header["facts"] for header, _ in found if header["kind"] == "facts")
    assert facts["splits"]["train"]["classes"] == [16, 16]  # of 32 rows an even share
    with closing(Stations(tables, quick(tables, {}))) as plain:
        answer_all(tables, quick(tables, {}), plain, "plain")
    exact = next(h["facts"] for h, _ in map(unpack, plain.left["north"]) if h["kind"] == "facts")
    assert exact["mark"] != facts["mark"]
    kept = next((tables / "at-north/runs").glob(f"*/{METRICS}")).read_text().splitlines()
    assert {"accuracy", "loss"} <= json.loads(kept[-1])["metrics"].keys() and json.loads(kept[-1])["round"] == 3
    shown = Preview.of("north", tables / "north.csv", text)
    assert not shown.metrics and "loss" not in {entry["name"] for entry in shown.entries}


@pytest.mark.long
def test_a_message_that_comes_again_gets_the_same_and_another_one_of_the_exchange_is_refused(tables):
    text, asked, noted = quick(tables, ROWS), list[bytes](), list[str]()

    class Heard(Stations):
        def exchange(self, messages, deadline, least=0):
            asked.append(messages["north"])
            return super().exchange(messages, deadline)

    submit(tables, text, Heard(tables, text))
    before = (tables / "at-north" / LEDGER).read_text()
    message = next(data for data in asked if b'"kind":"work"' in data)
    header, tree = unpack(message)
    moved = {name: tensor + 1 for name, tensor in tree["shared"]["shared"].items()}
    payload = pack(header, {**tree, "shared": {**tree["shared"], "shared": moved}})
    measured = pack({**header, "measure": "test"}, tree)
    for run in (tables / "at-north/runs").glob("*/*.exchange"):
        run.unlink()  # as if it had been forgotten: the reply is made anew
    with closing(Stations(tables, text, note=noted.append)) as stations:
        north = stations.at["north"]
        first, second = north.answer(message), north.answer(message)
        refused = [unpack(north.answer(other))[0] for other in (payload, measured)]
    assert first == second and unpack(first)[0]["kind"] == "done"
    assert [found.get("error") for found in refused] == [RefusalReason.MESSAGE, RefusalReason.MESSAGE]
    assert any("exchange 10001 was requested with another payload before" in line for line in noted)
    assert (tables / "at-north" / LEDGER).read_text() == before


@pytest.mark.long
def test_a_reply_that_no_site_has_cut_is_refused_by_the_server(tables):
    text = quick(tables, CLIENTS)
    stations = Stations(tables, text)
    answer = stations.at["north"].answer

    def loud(data: bytes) -> bytes:
        reply = answer(data)
        header, tree = unpack(reply)
        if header.get("program") != "train":
            return reply
        moved = {name: tensor + 1 for name, tensor in tree["reply"]["shared"].items()}
        return pack(header, {**tree, "reply": {**tree["reply"], "shared": moved}})

    stations.at["north"].answer = loud  # type: ignore[method-assign]
    said = r"refused: the reply of site 'north': its change has the norm 4\.\d+; at most 1 is allowed \(privacy.clip\)"
    with pytest.raises(PerfedError, match=said) as error:
        submit(tables, text, stations)
    assert "\n" not in str(error.value)


@pytest.mark.long
def test_epsilon_on_the_card_is_the_accountant_s_and_of_each_contributor(tables):
    text = quick(tables, ROWS)
    submit(tables, text, Stations(tables, text))
    (told,) = read_ledger(tables / "at-north")
    of_rounds = {"10001": 2, "20001": 2, "30001": 2}  # head and body
    assert told.releases == {"number of rows": 1, **of_rounds}
    expected = closed_form(7 / told.noise**2, 1e-3)
    assert 0.99 * 6 < expected <= 6.01
    facts = load_site_model(tables / "at-north", "north", tables / "north.csv").facts
    assert facts["privacy"]["spent"] == pytest.approx(expected, rel=5e-3)
    summary = json.loads((tables / "run/summary.json").read_text())
    assert summary["privacy"]["spent"]["north"] == pytest.approx(expected, rel=5e-3)
    text = card(facts)
    assert re.search(r"\| north \| not known here \| (5\.9\d+|6) \|", text)
    assert re.search(r"\| south \| not known here \| at most (5\.9\d+|6) \|", text)


@pytest.mark.long
def test_runs_add_up_and_a_policy_s_epsilon_ends_them_at_both_ends(tables):
    text, noted = quick(tables, ROWS), list[str]()
    narrow = Policy(epsilon=8.0)
    submit(tables, text, Stations(tables, text, narrow))
    with closing(Stations(tables, text, narrow, noted.append)) as stations:
        with pytest.raises(PerfedError, match=r"its administrator sees more \(epsilon\)") as error:
            answer_all(tables, text, stations, "second")
        assert [unpack(reply)[0]["kind"] for reply in stations.left["north"]] == ["error"]
    said = noted[0].partition("would make epsilon ")[2]
    (told,) = read_ledger(tables / "at-north")
    both = closed_form(2 * told.squared_mu, 1e-3)
    assert float(said.split()[0]) == pytest.approx(both, rel=5e-3) and said.endswith("allowed: at most 8")
    assert "\n" not in str(error.value) and not (tables / "second/config.toml").exists()
    with closing(Stations(tables, text, Policy(epsilon=10.0))) as stations:
        answer_all(tables, text, stations, "second")
    assert compute_ledger_epsilon(read_ledger(tables / "at-north"), "sample", 1e-3) == pytest.approx(both, rel=5e-3)
    assert compute_ledger_epsilon(read_ledger(tables / "at-north"), "client", 1e-3) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "key", "said"),
    [
        (Policy(epsilon=3.0), "epsilon", "epsilon: 6; allowed: at most 3"),
        (Policy(epsilon=7.0, delta=1e-7), "epsilon", "at delta 1e-07; allowed: at most 7"),
        (Policy(methods=("flic-*",)), "methods", "methods: fedrep; allowed: flic-*"),
    ],
)
def test_a_policy_that_forbids_says_so_in_one_line_before_anything_is_told(policy, key, said, tables):
    text = quick(tables, ROWS)
    settings = SiteSettings("north", tables / "north.csv", ServerAddress("127.0.0.1:9"), tables / "at", text, policy)
    with pytest.raises(PerfedError) as error:
        check_site(settings)
    assert str(error.value).endswith(said) and "\n" not in str(error.value)
    stations = Stations(tables, text, policy)
    with pytest.raises(PerfedError, match=rf"site.* its administrator sees more \({key}\)"):
        submit(tables, text, stations)
    assert [unpack(reply)[0]["kind"] for reply in stations.left["north"]] == ["error"]


@pytest.mark.long
@pytest.mark.parametrize(("unit", "said"), [("sample", "32 rows; .* number of rows"), ("client", "3 sites; .* sites")])
def test_a_delta_that_gives_a_row_or_site_away_is_refused_where_a_policy_bounds_epsilon(unit, said, tables):
    text = quick(tables, {"privacy": {"unit": unit, "epsilon": 6.0, "delta": 0.5}})
    settings = (tables / "north.csv", ServerAddress("127.0.0.1:9"), tables / "at", text)
    with pytest.raises(PerfedError, match=rf"delta: 0.5, with {said}, or delta of the policy"):
        check_site(SiteSettings("north", *settings, Policy(epsilon=7.0)))
    check_site(SiteSettings("north", *settings, Policy(epsilon=100.0, delta=1e-5)))


@pytest.mark.long
def test_a_policy_allows_a_study_whose_losses_and_metrics_stay(tables):
    text = quick(tables, ROWS)
    submit(tables, text, Stations(tables, text, Policy(entries=("shared/*", "num_samples"), metrics=())))


@pytest.mark.long
def test_a_budget_with_noise_ends_the_run_and_no_site_answers_beyond_it(tables):
    text = quick(tables, {"privacy": {"epsilon": 4.0, "delta": 1e-3, "noise": 2.0}}, rounds=9)
    submit(tables, text, Stations(tables, text))
    summary = json.loads((tables / "run/summary.json").read_text())
    rounds = summary["rounds"]
    assert summary["stopped_by"] == "privacy" and 0 < rounds < 9
    (told,) = read_ledger(tables / "at-north")
    assert sum(name.isdecimal() for name in told.releases) == rounds and closed_form(told.squared_mu, 1e-3) <= 4.0
    assert closed_form(told.squared_mu + 2 / 4.0, 1e-3) > 4.0  # another round


def test_a_secret_that_others_may_read_or_that_is_cut_is_refused(tmp_path):
    secret = load_or_create_secret(tmp_path)
    assert load_or_create_secret(tmp_path) == secret
    (tmp_path / SECRET).chmod(0o644)
    with pytest.raises(PerfedError, match="others may read the secret of this run's noise; chmod 600"):
        load_or_create_secret(tmp_path)
    (tmp_path / SECRET).chmod(0o600)
    (tmp_path / SECRET).write_bytes(secret[:5])
    with pytest.raises(PerfedError, match="is damaged: 5 bytes; 32 are needed"):
        load_or_create_secret(tmp_path)


@pytest.mark.long
def test_a_run_whose_secret_is_gone_counts_anew(tables):
    """Noise that is drawn again for the same rounds tells more of the same rows."""
    text = quick(tables, ROWS)
    submit(tables, text, Stations(tables, text))
    (first,) = read_ledger(tables / "at-north")
    shutil.rmtree(tables / "at-north/runs")
    for site in ("south", "west"):
        shutil.rmtree(tables / f"at-{site}")
    shutil.rmtree(tables / "run")
    submit(tables, text, Stations(tables, text))
    lines = read_ledger(tables / "at-north")
    assert [told.run for told in lines] == [first.run] * 2 and lines[0].noise_of != lines[1].noise_of


def test_a_ledger_that_is_damaged_is_refused(tmp_path):
    (tmp_path / LEDGER).write_text('[{"run": 3}]')
    with pytest.raises(PerfedError, match=LEDGER):
        read_ledger(tmp_path)
    one = LedgerLine("run", "x", "study", "sample", 1e-3, 2.0, 1, {"1": 3})
    assert compute_ledger_epsilon([one, one], "sample", 1e-3) == pytest.approx(closed_form(2.0, 1e-3), rel=5e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"evaluation": {"stop": "validated"}},
            "evaluation.stop = 'validated': under .privacy. losses and metrics stay",
        ),
        ({"evaluation": {"targets": [0.5]}}, "evaluation.targets: under .privacy. losses and metrics stay"),
        ({"privacy": {"epsilon": 6.0, "delta": 1e-3, "sampling": "poisson"}}, "at sites use 'full'"),
        ({"method": "fedpac"}, "privacy: fedpac does not declare what it sends"),
    ],
)
def test_what_cannot_be_private_at_sites_is_refused_in_one_line(changes, said):
    data = {
        "name": "tables",
        "files": ["a.csv", "b.csv"],
        "target": "ill",
        "validation_fraction": 0.2,
        "public": PUBLIC,
    }
    table = {"method": "fedavg", "rounds": 2, "data": data, "model": {"head": "linear"}, **ROWS, **changes}
    with pytest.raises(PerfedError, match=said) as error:
        make_deployed_study(validate(table), ["a", "b"])
    assert "\n" not in str(error.value)
