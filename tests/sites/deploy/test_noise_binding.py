"""Noise and ledger entries of a private run are bound to everything that a reply depends on, whatever the server names.

Each test is an attack: a second agreement, a run id that is used again, rows that change, a second deployment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from stations import COLUMNS, PUBLIC, Stations, answer_all, study, submit

from perfed import rng
from perfed.data.federation_schema import FederationSchema
from perfed.errors import PerfedError
from perfed.experiment.config import read
from perfed.sites.deploy.own_model import load_site_model
from perfed.sites.deploy.part import SiteRun
from perfed.sites.deploy.policy import Policy
from perfed.sites.deploy.site_agent import SiteAgent, SiteSettings, check_site
from perfed.sites.deploy.spending import LEDGER, compute_ledger_epsilon, read_ledger
from perfed.sites.deploy.study import make_deployed_study
from perfed.sites.flower.message import pack, unpack
from perfed.sites.flower.probe import ServerAddress
from perfed.sites.flower.refusal import RefusalReason

PRIVATE = {
    "method": "fedrod",  # which sends noisy class counts, besides parameters
    "methods": {"fedrod": {"placement": {"embedding": "personal"}}},
    "model": {"embedding": {"kind": "linear", "out": 4}, "body": {"kind": "hidden-layer", "out": 4}, "head": "linear"},
    "rounds": 2,
    "training": {"lr": 0.1, "local_epochs": 1, "batch_size": 16, "optimizer": "sgd"},
    "privacy": {"epsilon": 6.0, "delta": 1e-3},
    "evaluation": {"every": 2},
}


class Recorder(Stations):
    """Sites whose messages are kept, to be sent again."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked: list[bytes] = []

    def exchange(self, messages, deadline, least=0):
        self.asked.append(messages["north"])
        return super().exchange(messages, deadline, least)

    def first(self, kind: str) -> bytes:
        """The first message of a kind to the site north."""
        return next(data for data in self.asked if unpack(data)[0]["kind"] == kind)


@pytest.fixture
def finished(tables):
    """A run of three sites that has ended, its study, and the messages of its server."""
    text = study(tables, **PRIVATE)
    stations = Recorder(tables, text)
    submit(tables, text, stations)
    return tables, text, stations


def replies_of(path: Path, text: str | None, *messages: bytes, policy: Policy | None = None) -> list[dict[str, Any]]:
    """Headers of what the site north replies to messages, after it was started again."""
    with closing(SiteAgent(path / "at-north", "north", path / "north.csv", text, policy=policy)) as site:
        return [unpack(site.answer(message))[0] for message in messages]


def with_agreement(message: bytes, **changes: Any) -> bytes:
    header, _ = unpack(message)
    return pack({**header, "agreement": {**header["agreement"], **changes}}, {})


@pytest.mark.long
def test_a_second_agreement_of_a_run_is_refused_and_the_first_is_answered_again(finished):
    path, text, stations = finished
    before = (path / "at-north" / LEDGER).read_bytes()
    agreement, work = stations.first("agreement"), stations.first("work")
    classes = unpack(agreement)[0]["agreement"]["classes"]
    again, reversed_classes, worked = replies_of(
        path, text, agreement, with_agreement(agreement, classes=classes[::-1]), work
    )
    assert again["kind"] == "facts" and worked["kind"] == "done"
    assert reversed_classes["error"] == RefusalReason.JOINED
    assert (path / "at-north" / LEDGER).read_bytes() == before


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        lambda agreement: agreement.update(classes=agreement["classes"][::-1]),
        lambda agreement: agreement.update(classes=[*agreement["classes"], "unheard of"]),
        lambda agreement: agreement.update(domains=["a", "b"]),
        lambda agreement: agreement["columns"][0].update(scale=[0.0, 1e-6]),
        lambda agreement: agreement["columns"][0].update(scale=None),
        lambda agreement: agreement["columns"][-1].update(levels=["no"]),
        lambda agreement: agreement["columns"][0].update(kind="boolean"),
        lambda agreement: agreement["columns"].append({**agreement["columns"][0], "name": "weight"}),
    ],
    ids=["order", "class", "domains", "scale", "no scale", "levels", "kind", "column"],
)
def test_an_agreement_that_is_not_what_data_public_says_is_refused_before_the_run(change, tables):
    """A server that may choose classes or scales reads values off the replies."""
    files = [str(tables / f"{site}.csv") for site in COLUMNS]
    data = {"name": "tables", "files": files, "target": "ill", "columns": "union", "public": PUBLIC}
    private = study(tables, **PRIVATE, data=data)
    stations = Recorder(tables, private)
    stations.stop_after = 2  # sites have told what they tell, and agreed
    with closing(stations), pytest.raises(KeyboardInterrupt):
        answer_all(tables, private, stations)
    header, _ = unpack(stations.first("agreement"))
    other = {**header, "run": "another", "agreement": deepcopy(header["agreement"]), "ended": header["run"]}
    plain = pack(other, {})
    change(other["agreement"])
    told = pack({**header, "kind": "study", "run": "another"}, {})
    _, refused, accepted = replies_of(tables, private, told, pack(other, {}), plain)
    assert refused["error"] == RefusalReason.DATA and accepted["kind"] == "facts"
    assert read_ledger(tables / "at-north") == []


@pytest.mark.long
def test_one_run_id_for_several_studies_is_answered_for_the_first_only(finished):
    """A site whose administrator agrees to each; the ledger would have counted four studies as one."""
    path, text, stations = finished
    spent = compute_ledger_epsilon(read_ledger(path / "at-north"), "sample", 1e-3)
    told, agreement = stations.first("study"), stations.first("agreement")
    for rate in ("0.2", "0.3", "0.4"):
        other = text.replace("lr = 0.1", f"lr = {rate}")
        assert other != text
        messages = [pack({**unpack(data)[0], "study": other}, {}) for data in (told, agreement)]
        found = replies_of(path, other, *messages, policy=Policy(epsilon=100.0))
        assert [reply["error"] for reply in found] == [RefusalReason.JOINED, RefusalReason.JOINED]
    assert compute_ledger_epsilon(read_ledger(path / "at-north"), "sample", 1e-3) == spent


@pytest.mark.long
def test_other_studies_under_other_run_ids_add_up(finished):
    path, text, stations = finished
    other = text.replace("lr = 0.1", "lr = 0.2")
    with closing(Stations(path, other)) as again:
        answer_all(path, other, again, "other")
    one, two = read_ledger(path / "at-north")
    assert one.run != two.run and one.noise_of != two.noise_of and one.squared_mu == two.squared_mu
    refused = replies_of(path, text, stations.first("study"), policy=Policy(epsilon=7.0))
    assert refused[0]["error"].startswith(RefusalReason.POLICY)  # the other study counts, whatever the run id


@pytest.mark.parametrize(
    ("sites", "answer"), [(list("abc"), "told"), (list("abcdefgh"), RefusalReason.STUDY), (["a"], RefusalReason.STUDY)]
)
def test_a_server_chooses_the_names_of_the_sites_of_a_private_study_and_not_their_number(sites, answer, finished):
    """Under masks a site's share of the noise is the smaller the more sites there are."""
    path, text, stations = finished
    other = make_deployed_study(read(text, "the study"), sites).to_toml()
    header, _ = unpack(stations.first("study"))
    (reply,) = replies_of(path, text, pack({**header, "run": "another", "study": other}, {}))
    assert reply.get("error", reply["kind"]) == answer


@pytest.mark.long
def test_a_site_that_takes_any_study_refuses_private_ones(finished):
    """A server that makes up the study could ask for classes or columns whose refusal tells of single rows."""
    path, text, stations = finished
    spent = (path / "at-north" / LEDGER).read_bytes()
    messages = [stations.first(kind) for kind in ("study", "agreement", "work")]
    assert [reply["error"] for reply in replies_of(path, None, *messages)] == [RefusalReason.ANY_STUDY] * 3
    assert (path / "at-north" / LEDGER).read_bytes() == spent
    assert [reply["kind"] for reply in replies_of(path, text, *messages)] == ["told", "facts", "done"]


def change_a_label(file: Path) -> None:
    table = pd.read_csv(file)
    table.loc[3, "ill"] = {"ill": "well", "well": "ill"}[table.loc[3, "ill"]]
    table.to_csv(file, index=False)


@pytest.mark.long
def test_rows_that_change_end_a_private_run_at_the_site(finished):
    """One label is corrected and the site starts again: with the old noise, noisy counts would differ by that label."""
    path, text, stations = finished
    before = (path / "at-north" / LEDGER).read_bytes()
    messages = [stations.first(kind) for kind in ("study", "agreement", "work")]
    change_a_label(path / "north.csv")
    told, agreed, worked = replies_of(path, text, *messages)
    assert told["kind"] == "told" and agreed["error"] == RefusalReason.ROWS and worked["error"] == RefusalReason.ROWS
    assert (path / "at-north" / LEDGER).read_bytes() == before
    with closing(Stations(path, text)) as again:
        answer_all(path, text, again, "run-2")
    assert len(read_ledger(path / "at-north")) == 2


@pytest.mark.long
@pytest.mark.parametrize("package", ["perfed", "torch"])
def test_a_private_run_does_not_go_on_with_other_versions(package, finished, monkeypatch):
    """They may compute other replies to the same messages, and the noise would be the same."""
    path, text, stations = finished
    before, noted = (path / "at-north" / LEDGER).read_bytes(), list[str]()
    messages = [stations.first(kind) for kind in ("study", "agreement", "work")]
    if package == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    else:
        monkeypatch.setattr("perfed.sites.deploy.part.installed_version", lambda: "9.9")
    with closing(SiteAgent(path / "at-north", "north", path / "north.csv", text, noted.append)) as site:
        told, agreed, worked = (unpack(site.answer(message))[0] for message in messages)
    assert (
        told["kind"] == "told" and agreed["error"] == RefusalReason.VERSION and worked["error"] == RefusalReason.VERSION
    )
    assert f"{package} 9.9" in noted[-1] and "submit the study again with another --out" in noted[-1]
    assert (path / "at-north" / LEDGER).read_bytes() == before
    with closing(Stations(path, text)) as again:
        answer_all(path, text, again, "run-2")
    one, two = read_ledger(path / "at-north")
    assert one.squared_mu == two.squared_mu


@pytest.mark.long
@pytest.mark.parametrize(("method", "refused"), [("fedrod", False), ("fedavg-ft", True)])
def test_a_model_fine_tuned_with_noise_is_not_made_again_by_other_versions(method, refused, tables, monkeypatch):
    """It would be a further release, or one with the same noise; models that are kept as they are need none."""
    text = study(tables, **{**PRIVATE, "method": method, "methods": {method: PRIVATE["methods"]["fedrod"]}})
    submit(tables, text, Stations(tables, text))
    monkeypatch.setattr(torch, "__version__", "9.9")
    model = (tables / "at-north", "north", tables / "north.csv")
    if refused:
        with pytest.raises(
            PerfedError, match=r"this model was fine-tuned with noise by perfed .* install the earlier versions"
        ):
            load_site_model(*model)
    else:
        assert load_site_model(*model).facts["privacy"]["spent"] > 0


def change_a_cell(column: str, value: object) -> Callable[[pd.DataFrame], None]:
    def change(table: pd.DataFrame) -> None:
        table[column] = table[column].astype(object)
        table.loc[3, column] = value

    return change


INVALID = {
    "class": change_a_cell("ill", "maybe"),
    "missing target": change_a_cell("ill", None),
    "text": change_a_cell("age", "old"),
    "infinite": change_a_cell("age", float("inf")),
    "too large": change_a_cell("age", 1e300),
}


@pytest.mark.long
@pytest.mark.parametrize("columns", ["own", "union"])
@pytest.mark.parametrize("change", INVALID.values(), ids=INVALID)
def test_rows_that_do_not_fit_are_said_at_the_start_and_not_to_the_server(change, columns, tables):
    """What is wrong with a row would be seen from the reply; what changes later is read at the next start."""
    files = [str(tables / f"{site}.csv") for site in COLUMNS]
    data = {"name": "tables", "files": files, "target": "ill", "columns": columns, "public": PUBLIC}
    text = study(tables, **PRIVATE, data=data)
    stations = Recorder(tables, text)
    submit(tables, text, stations)
    folder, file, asked = tables / "other", tables / "north.csv", stations.asked
    with closing(SiteAgent(folder, "north", file, text)) as site:
        table = pd.read_csv(file)
        change(table)
        table.to_csv(file, index=False)
        kinds = [unpack(site.answer(message))[0]["kind"] for message in asked]
    assert kinds == [unpack(reply)[0]["kind"] for reply in stations.left["north"]]
    settings = SiteSettings("north", file, ServerAddress("127.0.0.1:9"), tables / "new", text)
    for start in (lambda: check_site(settings), lambda: SiteAgent(folder, "north", file, text)):
        with pytest.raises(PerfedError, match=r"age|ill") as error:
            start()
        assert "\n" not in str(error.value)


@pytest.mark.long
def test_few_rows_of_a_class_are_said_at_the_start_and_not_to_the_server(finished):
    path, text, _ = finished
    with pytest.raises(PerfedError, match=r"rows_per_class: .*allowed: at least 30"):
        SiteAgent(path / "other", "north", path / "north.csv", text, policy=Policy(rows_per_class=30))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["study", "agreement"])
def test_where_a_policy_bounds_epsilon_no_row_is_read_for_a_study_that_bounds_none(kind, tables):
    """A site that takes any study would say by its refusals how many rows of each class there are."""
    plain = study(tables, **{name: value for name, value in PRIVATE.items() if name != "privacy"})
    stations = Recorder(tables, plain)
    submit(tables, plain, stations)
    header, _ = unpack(stations.first(kind))
    (tables / "north.csv").write_text("nothing of the kind\n1\n")
    policy = Policy(epsilon=3.0, rows_per_class=30)
    folder = tables / "other"
    with closing(SiteAgent(folder, "north", tables / "north.csv", policy=policy)) as site:
        reply = unpack(site.answer(pack({**header, "run": "another"}, {})))[0]
    assert reply["error"] == f"{RefusalReason.POLICY} (epsilon)"
    with pytest.raises(PerfedError, match=r"--any-study: a policy with epsilon allows studies with .privacy. only"):
        check_site(SiteSettings("north", tables / "north.csv", ServerAddress("127.0.0.1:9"), folder, None, policy))


def part_of(path: Path, text: str, schema: FederationSchema, run: str = "run") -> SiteRun:
    return SiteRun("north", path / "north.csv", run, text, schema, "", "")


def noise_of(part: SiteRun, folder: Path, message: bytes = b"") -> torch.Tensor:
    """The noise that does not depend on the message, such as that of class counts, or that of a message's answer."""
    budget = part.make_budget(folder)
    assert budget is not None
    return budget.make_noise(message).draw(rng.key(0, "counts"), 8, torch.float64, once=not message)


@pytest.mark.long
def test_noise_depends_on_study_agreement_rows_and_run_also_where_it_is_drawn_once(finished):
    path, text, stations = finished
    plain = unpack(stations.first("agreement"))[0]["agreement"]
    schema = FederationSchema.of_plain(plain, "here")
    domains = schema.model_copy(update={"domains": ("a",)})
    folder = path / "at-north"
    first = part_of(path, text, schema)
    assert torch.equal(noise_of(first, folder), noise_of(part_of(path, text, schema), folder))
    message = hashlib.sha256(b"one").digest()
    assert not torch.equal(noise_of(first, folder, message), noise_of(first, folder, hashlib.sha256(b"two").digest()))
    others = [
        part_of(path, text.replace("lr = 0.1", "lr = 0.2"), schema),
        part_of(path, text, schema, run="another"),
    ]
    found = [noise_of(first, folder), *(noise_of(part, folder) for part in others)]
    assert len({tuple(noise.tolist()) for noise in found}) == 3
    with pytest.raises(PerfedError, match=r"has other domains of the target than data\.public"):
        noise_of(part_of(path, text, domains), folder)
    change_a_label(path / "north.csv")
    assert not torch.equal(noise_of(part_of(path, text, schema), folder), found[0])


def test_noise_depends_on_the_name_under_which_the_folder_of_a_site_is_used(finished):
    """Mini-batches do, so that replies under two names differ; noise that is drawn once would be counted once."""
    path, text, stations = finished
    schema = FederationSchema.of_plain(unpack(stations.first("agreement"))[0]["agreement"], "here")
    data = path / "data"  # with test rows apart, which are otherwise drawn by the site's name
    data.mkdir()
    for name in ("rows.csv", "test.csv"):
        (data / name).write_bytes((path / "north.csv").read_bytes())
    parts = [SiteRun(site, data, "run", text, schema, "", "") for site in ("north", "other")]
    assert parts[0].current_rows_hash == parts[1].current_rows_hash
    first, second = (noise_of(part, path / "at-north") for part in parts)
    assert not torch.equal(first, second)


@pytest.mark.long
def test_deployments_that_share_a_ledger_add_up(finished):
    """A second deployment with the same table under another site's name counts in the same file."""
    path, text, _ = finished
    shared = path / "spent.json"
    (path / "at-north" / LEDGER).rename(shared)
    second = path / "second"
    second.mkdir()
    for site in ("north", "south", "west"):
        (second / f"{site}.csv").write_bytes((path / f"{site}.csv").read_bytes())
    for folder in (path / "at-north", second / "at-south"):
        folder.mkdir(exist_ok=True)
        (folder / LEDGER).symlink_to(shared)
    with closing(Stations(second, text)) as stations:
        answer_all(second, text, stations)
    assert (second / "at-south" / LEDGER).is_symlink()
    assert len(read_ledger(path / "at-north")) == len(read_ledger(second / "at-south")) == 2
    assert compute_ledger_epsilon(read_ledger(path / "at-north"), "sample", 1e-3) > 1.2 * compute_ledger_epsilon(
        read_ledger(second / "at-west"), "sample", 1e-3
    )
