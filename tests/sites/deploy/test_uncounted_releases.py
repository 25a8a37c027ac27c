"""A curious server asks for more than a round, or for studies of both units, to be told more than the ledger counts."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from gaussian import closed_form
from stations import Stations, answer_all, study, submit
from test_noise_binding import PRIVATE, Recorder, replies_of

from perfed.errors import PerfedError
from perfed.experiment.config import read
from perfed.sites.deploy.policy import Policy
from perfed.sites.deploy.site_agent import SiteSettings, check_site
from perfed.sites.deploy.spending import LEDGER, compute_ledger_epsilon, read_ledger
from perfed.sites.deploy.trial import build_private_method
from perfed.sites.flower.message import pack, unpack
from perfed.sites.flower.probe import ServerAddress
from perfed.sites.flower.refusal import RefusalReason
from perfed.sites.flower.site import SITE_MODEL
from perfed.training.private import PrivateTraining

FEDREP = {"method": "fedrep", "methods": {"fedrep": {"placement": {"embedding": "personal"}}}}


@pytest.mark.long
def test_a_site_that_is_asked_to_settle_after_each_round_counts_what_it_trains(tables):
    """Fitting what is a site's own looks at its rows, and training may go on from the state that it leaves."""
    text = study(tables, **{**PRIVATE, **FEDREP, "participation": {"fit_unused": True}})
    stations = Recorder(tables, text)
    stations.stop_after = 3  # sites have told what they tell, agreed, and trained for a round
    with closing(stations), pytest.raises(KeyboardInterrupt):
        answer_all(tables, text, stations)
    header, tree = unpack(stations.first("work"))
    settle = {**header, "program": ":settle", "index": 3000, "sequence": 13_001, "base": 10_001}
    settle |= {"extensions": "penalties", "measure": None}
    shared = {"shared": tree["shared"]["shared"], "extensions": tree["shared"]["extensions"]}
    onward = {**header, "round": 2, "sequence": 20_001, "base": 13_001}
    messages = [pack(settle, {"shared": shared, "row": {}}), pack(onward, tree)]
    settled, trained = replies_of(tables, text, *messages)
    (line,) = read_ledger(tables / "at-north")
    assert settled["kind"] == "done"
    assert line.releases == {"number of rows": 1, "10001": 2, "13001": 1}  # head and body, then the head alone
    assert trained["error"] == RefusalReason.BUDGET  # of two rounds in all


@pytest.mark.long
def test_runs_that_protect_clients_count_to_what_is_told_of_a_row(tables):
    """Studies of both units, one after the other, share the budget of a policy."""
    policy = Policy(epsilon=7.0)
    private = study(tables, **PRIVATE)
    with closing(Recorder(tables, private, policy)) as stations:
        answer_all(tables, private, stations)
    before = compute_ledger_epsilon(read_ledger(tables / "at-north"), "sample", 1e-3)
    other = study(tables, **{**PRIVATE, **FEDREP, "privacy": {"unit": "client", "epsilon": 6.0, "delta": 1e-3}})
    told = pack({"kind": "study", "run": "another", "study": other, "site": "north"}, {})
    (refused,) = replies_of(tables, other, told, policy=policy)
    assert before < 7.0 and str(refused.get("error", "")).startswith(RefusalReason.POLICY)


@pytest.mark.long
def test_an_earlier_ledger_in_the_place_of_the_present_one_is_refused(tables):
    """Restored from a backup, it would let the site answer once more what it has answered since."""
    text = study(tables, **PRIVATE)
    stations = Recorder(tables, text)
    stations.stop_after = 3
    with closing(stations), pytest.raises(KeyboardInterrupt):
        answer_all(tables, text, stations)
    earlier = (tables / "at-north" / LEDGER).read_bytes()
    with closing(Recorder(tables, text)) as again:
        answer_all(tables, text, again)
    (tables / "at-north" / LEDGER).write_bytes(earlier)
    with pytest.raises(PerfedError, match=r"exchanges of run '.*' that this site has answered are missing"):
        read_ledger(tables / "at-north")


def test_a_ledger_from_before_an_evaluation_is_refused(tables):
    """Metrics with noise leave no state at the site, and with an older ledger they would leave a second time."""
    text = noisy_study(tables, "fedrep", rounds=2, evaluation={"every": 1})
    stations = submit(tables, text, Recorder(tables, text))
    folder = asked_anew(tables, stations)
    evaluations = [data for data in stations.asked if unpack(data)[0].get("index") == -1]
    replies_of(folder, text, *[data for data in stations.asked if data not in evaluations])
    earlier = (folder / "at-north" / LEDGER).read_bytes()
    assert all("error" not in reply for reply in replies_of(folder, text, *evaluations))
    (folder / "at-north" / LEDGER).write_bytes(earlier)
    with pytest.raises(PerfedError, match=r"exchanges of run '.*' that this site has answered are missing"):
        read_ledger(folder / "at-north")
    with pytest.raises(PerfedError, match=r"exchanges of run '.*' that this site has answered are missing"):
        check_site(SiteSettings("north", folder / "north.csv", ServerAddress("127.0.0.1:1"), folder / "at-north", text))
    assert [reply.get("metrics") for reply in replies_of(folder, text, *evaluations)] == [None, None]


class GradientCounter:
    """Counts gradients of training rows in batches of 16, of which the site north has 32 rows to train on."""

    def __init__(self, monkeypatch) -> None:
        self.gradients = 0
        plain = PrivateTraining.compute_gradients

        def counted(private: PrivateTraining, *arguments):
            self.gradients += private.counter is not None
            return plain(private, *arguments)

        monkeypatch.setattr(PrivateTraining, "compute_gradients", counted)

    @property
    def passes(self) -> float:
        """How often each row has been in a gradient."""
        return self.gradients / 2


def noisy_study(path: Path, method: str, **changes: object) -> str:
    """A study that has no epsilon, is evaluated after its last round, and whose metrics leave with noise."""
    privacy = {"noise": 3.0, "delta": 1e-3, "metrics": "noisy"}
    methods = {} if method == "local-full" else {method: {"placement": {"embedding": "personal"}}}
    table = {"method": method, "methods": methods, "rounds": 4, "privacy": privacy, "evaluation": {"every": 4}}
    return study(path, **{**PRIVATE, **table, **changes})


def asked_anew(path: Path, stations: Recorder) -> Path:
    """A site that has heard what came before training from the server of ``stations``, and nothing else."""
    folder = path / "attacked"
    folder.mkdir()
    (folder / "north.csv").write_bytes((path / "north.csv").read_bytes())
    return folder


def of_round(messages: list[bytes], round_: int, program: str, **changes: object) -> bytes:
    """The first message that asks for a program, as one of another round."""
    header, tree = next(found for data in messages if (found := unpack(data))[0].get("program") == program)
    index = int(changes.get("index", header["index"]))
    sequence = round_ * 10_000 + (index + 1 if index >= 0 else 9_999)
    return pack({**header, "round": round_, "sequence": sequence, "keep": [10_001], **changes}, tree)


def check_sum(folder: Path, gradients: GradientCounter, evaluations: int) -> None:
    """Compare the ledger with the closed form of what was computed and of the metrics that left."""
    (line,) = read_ledger(folder / "at-north")
    counts = sum(name.startswith("number") for name in line.releases)
    training = (counts + gradients.passes) / 3.0**2
    assert line.metrics and sum(line.metrics.values()) == evaluations
    expected = closed_form(max(training, evaluations / line.metrics_noise**2), 1e-3)
    assert compute_ledger_epsilon([line], "sample", 1e-3) == pytest.approx(expected, rel=5e-3)


@pytest.mark.long
def test_training_from_an_earlier_state_of_the_round_is_counted(tables, monkeypatch):
    """Local-Full trains what has not trained in the round yet: from an older state it does so again."""
    text = noisy_study(tables, "local-full")
    stations = submit(tables, text, Recorder(tables, text))
    opening = [data for data in stations.asked if unpack(data)[0]["kind"] != "work"]
    gradients, folder = GradientCounter(monkeypatch), asked_anew(tables, stations)
    again = of_round(stations.asked, 1, "train", index=1000, base=0, measure=None)
    messages = [of_round(stations.asked, 1, "train"), again]
    messages += [of_round(stations.asked, 1, "personalise", base=10_001)]
    messages += [of_round(stations.asked, 2, "personalise", base=11_001)]
    replies = replies_of(folder, text, *opening, *messages)
    assert [reply["kind"] for reply in replies] == ["told", "facts", *["done"] * 4]
    assert gradients.passes == 2  # an epoch each
    check_sum(folder, gradients, 2)


@pytest.mark.long
@pytest.mark.parametrize(("method", "passes"), [("fedavg-ft", 10), ("fedbabu", 5)])
def test_fine_tuning_of_evaluations_that_were_not_planned_is_counted(method, passes, tables, monkeypatch):
    text = noisy_study(tables, method)
    stations = submit(tables, text, Recorder(tables, text))
    opening = [data for data in stations.asked if unpack(data)[0]["kind"] != "work"]
    gradients, folder = GradientCounter(monkeypatch), asked_anew(tables, stations)
    messages = [of_round(stations.asked, round_, "personalise", base=0) for round_ in (1, 2, 3, 2)]
    replies = replies_of(folder, text, *opening, *messages)
    assert [reply["kind"] for reply in replies] == ["told", "facts", *["done"] * 4]
    assert replies[-1] == replies[-3]  # asked again
    gradients.gradients -= 2 * passes  # which was computed again, with the same noise
    assert gradients.passes == 3 * passes
    check_sum(folder, gradients, 3)


@pytest.mark.long
def test_models_that_stay_at_the_site_count_as_the_one_that_it_keeps(tables):
    text = noisy_study(tables, "fedavg-ft", privacy={"noise": 3.0, "delta": 1e-3}, evaluation={"every": 1})
    submit(tables, text, Stations(tables, text))
    (line,) = read_ledger(tables / "at-north")
    rounds = {f"{round_}0001": 1 for round_ in range(1, 5)}
    assert line.releases == {"number of rows": 1, **rounds, SITE_MODEL: 10}


@pytest.mark.long
@pytest.mark.parametrize("method", ["apfl", "ditto", "fedrod", "fedproto", "flic-hl", "flic-class", "mr-mtl", "pfedme"])
def test_what_sites_count_is_at_most_what_the_study_plans(method, tables):
    """The accountant's plan, from which the noise is found, and what is computed."""
    text = noisy_study(tables, method)
    submit(tables, text, Stations(tables, text))
    plan = build_private_method(read(text, "the study"))
    counted = sum(read_ledger(tables / "at-north")[0].releases.values())
    assert plan is not None and 0 < counted <= plan.sum_releases(4).full
    assert counted == plan.sum_releases(4).full or method in ("apfl", "flic-class")  # which train two parts in one pass
