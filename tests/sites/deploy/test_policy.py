"""What a site's administrator allows at most: ``policy.toml``."""

from __future__ import annotations

from pathlib import Path

import pytest
from stations import Stations, answer_all, study, submit

from perfed.errors import PerfedError
from perfed.sites.deploy.policy import Policy
from perfed.sites.deploy.site_agent import SiteAgent, SiteSettings, check_site
from perfed.sites.flower.message import unpack
from perfed.sites.flower.probe import ServerAddress
from perfed.sites.flower.refusal import RefusalReason

ENOUGH = """\
programs = ["train", "anchors.pretrain", "personalise"]
entries = ["shared/*", "num_samples", "extensions/anchors/*", "loss"]
metrics = ["accuracy", "loss", "auc"]
rounds = 3
bytes = 10000
"""
TOO_LITTLE = [
    ('"anchors.pretrain", ', "", "programs: anchors.pretrain; allowed: train, personalise"),
    ('"num_samples", ', "", "entries: num_samples; allowed: shared/*, extensions/anchors/*, loss"),
    (', "loss"]\nmetrics', "]\nmetrics", "entries: loss; allowed: shared/*, num_samples, extensions/anchors/*"),
    (', "auc"]', "]", "metrics: auc; allowed: accuracy, loss"),
    ("rounds = 3", "rounds = 2", "rounds: 3; allowed: at most 2"),
    ("bytes = 10000", "bytes = 100", "; allowed: at most 100"),
]


def policy(path: Path, text: str) -> Policy:
    (path / "policy.toml").write_text(text)
    return Policy.read(path / "policy.toml")


@pytest.mark.long
def test_a_policy_that_allows_what_the_study_needs_changes_nothing(tables):
    text = study(tables)
    sent = submit(tables, text, Stations(tables, text, policy(tables, ENOUGH)))
    assert {unpack(reply)[0]["kind"] for replies in sent.left.values() for reply in replies} == {
        *("told", "facts", "done")
    }


@pytest.mark.long
@pytest.mark.parametrize(("before", "after", "said"), TOO_LITTLE)
def test_a_policy_that_forbids_what_the_study_needs_says_so_at_the_start(before, after, said, tables):
    """Before anything is sent; and where the site takes any study, once it knows which, before it trains."""
    assert before in ENOUGH
    narrow, text = policy(tables, ENOUGH.replace(before, after)), study(tables)
    settings = SiteSettings("north", tables / "north.csv", ServerAddress("127.0.0.1:9"), tables / "at", text, narrow)
    with pytest.raises(PerfedError, match="the policy of this site does not allow what the study needs: ") as error:
        check_site(settings)
    assert str(error.value).endswith(said)
    stations = Stations(tables, None, narrow)
    with pytest.raises(PerfedError):
        submit(tables, text, stations)
    before = {"error"} if said.startswith("rounds") else {"told", "error"}  # what the study says itself comes first
    assert {unpack(reply)[0]["kind"] for reply in stations.left["north"]} == before
    assert not (tables / "at-north/run.json").exists()  # it has not joined


@pytest.mark.long
@pytest.mark.parametrize("change", ["nothing", "study", "policy"])
def test_a_site_that_starts_again_with_less_does_not_go_on_with_more(tables, change):
    """Whatever it has agreed to before: the run that it is in is of another study, or beyond the policy now."""
    text, asked = study(tables), list[bytes]()

    class Heard(Stations):
        def exchange(self, messages, deadline, least=0):
            asked.append(messages["north"])
            return super().exchange(messages, deadline)

    submit(tables, text, Heard(tables, text))
    given = study(tables, rounds=2) if change == "study" else text
    narrow = policy(tables, "rounds = 2" if change == "policy" else "")
    again = SiteAgent(tables / "at-north", "north", tables / "north.csv", given, policy=narrow)
    header = unpack(again.answer(asked[-1]))[0]
    again.close()
    said = {"nothing": None, "study": RefusalReason.STUDY, "policy": f"{RefusalReason.POLICY} (rounds)"}[change]
    assert (header["kind"], header.get("error")) == (("done", None) if said is None else ("error", said))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "round = 3",
            r"unknown key 'round' \(did you mean 'rounds'\?\); allowed: methods, programs, entries, metrics, rounds",
        ),
        ("rounds = 0", "rounds: .*greater than 0"),
        ("rounds = '3'", "rounds: "),
        ("programs = 'train'", "programs: "),
        ("rounds =", "cannot be read"),
    ],
)
def test_a_policy_that_says_something_else_is_refused_in_one_line(text, said, tmp_path):
    with pytest.raises(PerfedError, match=rf"^--policy .*policy\.toml: {said}") as error:
        policy(tmp_path, text)
    assert "\n" not in str(error.value)


OF_STUDY_OR_DATA = [
    ("methods = ['fedavg', 'ditto*']", "methods", "methods: flic-hl; allowed: fedavg, ditto*"),
    ("rows = 1000", "rows", "rows: 32 to train on; allowed: at least 1000"),
    ("rows_per_class = 25", "rows_per_class", "allowed: at least 25 of each class that has some"),
    ("epsilon = 3.0", "epsilon", "epsilon: the study sets no bound; allowed: at most 3"),
    ("secure_aggregation = true", "secure_aggregation", "allowed: studies with the table [secure_aggregation]"),
]


@pytest.mark.parametrize(("text", "key", "said"), OF_STUDY_OR_DATA)
def test_what_a_study_or_few_rows_forbid_is_named_at_both_ends_before_anything_is_told(text, key, said, tables):
    narrow, noted = policy(tables, text), list[str]()
    settings = SiteSettings(
        "north", tables / "north.csv", ServerAddress("127.0.0.1:9"), tables / "at", study(tables), narrow
    )
    with pytest.raises(PerfedError) as error:
        check_site(settings)
    assert str(error.value).endswith(said) and "\n" not in str(error.value)
    stations = Stations(tables, None, narrow, noted.append)
    with pytest.raises(
        PerfedError, match=rf"does not allow what the study needs; its administrator sees more \({key}\)"
    ):
        submit(tables, study(tables), stations)
    assert [unpack(reply)[0]["kind"] for reply in stations.left["north"]] == ["error"]
    assert any(line.endswith(said) for line in noted)  # the site's own terminal


@pytest.mark.long
def test_enough_rows_and_a_study_under_masks_pass(tables):
    text = study(tables, secure_aggregation={})
    narrow = policy(tables, "methods = ['flic-*']\nrows = 30\nrows_per_class = 5\nsecure_aggregation = true")
    sent = submit(tables, text, Stations(tables, text, narrow))
    kinds = {unpack(reply)[0]["kind"] for reply in sent.left["north"]}
    assert kinds == {"told", "facts", "done", "keys", "shares", "unmask"}


def test_epsilon_at_most_is_that_of_the_study(tables):
    """A stand-in of a study: the table [privacy] is of another part of perfed."""

    class Spends:
        def __init__(self, epsilon: float | None) -> None:
            self.privacy = type("Privacy", (), {"epsilon": epsilon})()

    policy(tables, "epsilon = 3.0").check_study(Spends(2.5))
    for epsilon, said in ((6.0, "epsilon: 6; allowed: at most 3"), (None, "epsilon: the study sets no bound")):
        with pytest.raises(PerfedError, match=said):
            policy(tables, "epsilon = 3.0").check_study(Spends(epsilon))


@pytest.mark.long
@pytest.mark.parametrize(
    "privacy", [{"unit": "client"}, {"unit": "sample", "metrics": "noisy"}], ids=["clients", "rows"]
)
def test_the_epsilon_of_the_study_allows_one_run_of_it(tables, privacy):
    """As the policy does that a site gets with its deployment."""
    more = {"method": "fedavg", "methods": {"fedavg": {"placement": {"embedding": "personal"}}}}
    more |= {"training": {"local_epochs": 1, "optimizer": "sgd", "batch_size": 16}}
    text = study(tables, **more, privacy={"epsilon": 6.0, "delta": 1e-3, **privacy}, evaluation={"every": 2}, rounds=2)
    limited = Policy(epsilon=6.0)
    submit(tables, text, Stations(tables, text, limited))
    with pytest.raises(PerfedError, match=r"its administrator sees more \(epsilon\)"):
        answer_all(tables, text, Stations(tables, text, limited), "second")
