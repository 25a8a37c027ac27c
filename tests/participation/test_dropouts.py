"""Clients that drop out, at random or as a file says: compared with a calculation client by client."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from engines import ENGINES, blobs, difference, make, serve, train
from scipy import stats
from test_policies import FIXED, IDS, chosen, selection

from perfed import rng
from perfed.errors import PerfedError
from perfed.participation.invitation import create_invitation
from perfed.participation.settings import Participation
from perfed.run.directory import RunDirectory
from perfed.run.run import Run
from perfed.testing.runs import build_network
from perfed.training.plan import Plan


def dropout(**settings) -> dict:
    return {"policy": "dropout", "dropout": settings}


def traced(tmp_path, text: str) -> dict:
    file = tmp_path / "dropouts.csv"
    file.write_text(text)
    return {"policy": "dropout_trace", "dropout_trace": {"file": str(file)}}


def drawn(client: str, round_: int, seed: int) -> float:
    """The number in [0, 1) that decides over one client in one round."""
    return float(rng.uniform(rng.key(seed, "dropout", round_, client), 1, dtype=rng.torch.float64))


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_each_invited_client_drops_out_by_its_own_draw(rate):
    for seed in (0, 1):
        for round_ in range(1, 20):
            invited = chosen({"rate": rate}, round_, seed=seed)
            policy = {**dropout(probability=0.4, clients={"c3": 1.0, "c4": 0.0}), "rate": rate}
            probability = {"c3": 1.0, "c4": 0.0}
            expected = [c for c in invited if drawn(c, round_, seed) >= probability.get(c, 0.4)]
            assert chosen(policy, round_, seed=seed) == expected
            assert "c3" not in expected and ("c4" in expected) == ("c4" in invited)


@pytest.mark.long
def test_clients_drop_out_independently_with_the_probability():
    choice = [set(chosen(dropout(probability=0.3), round_, rounds=9999)) for round_ in range(1, 601)]
    counts = Counter(client for used in choice for client in used)
    for client in IDS:
        assert stats.binomtest(counts[client], 600, 0.7).pvalue > 1e-4
    both = sum({"c0", "c1"} <= used for used in choice)
    assert stats.binomtest(both, 600, 0.49).pvalue > 1e-3


def test_a_round_lasts_until_the_last_reply_and_all_invited_are_asked():
    clock = {"speeds": "dynamic", "communication": 0.5}
    for round_ in range(1, 20):
        choice = selection(dropout(probability=0.5), clock).choose(round_)
        assert sorted(choice.replied) == list(IDS)
        waited = choice.ids or IDS
        assert choice.seconds == max(choice.replied[client] for client in waited)


def test_a_round_that_all_drop_out_of_changes_nothing():
    server = train(serve(make("fedrep"), blobs((5, 4)), participation=Participation(**dropout(probability=1.0))), 3)
    untouched = serve(make("fedrep"), blobs((5, 4)))
    untouched.prepare()
    assert difference(server, untouched) == 0


def test_nobody_drops_out_with_probability_0():
    with_policy = train(
        serve(make("fedrep"), blobs((5, 4)), participation=Participation(**dropout(probability=0.0))), 2
    )
    assert difference(with_policy, train(serve(make("fedrep"), blobs((5, 4))), 2)) == 0


TRACE = "note,client,round\nflat battery,c2,1\n,c0,1\n,c5,3\nalways,c7,*\nafter the end,c1,500\n"


def test_clients_drop_out_in_the_rounds_of_the_trace(tmp_path):
    out = {1: {"c0", "c2", "c7"}, 3: {"c5", "c7"}}
    for round_ in range(1, 8):  # the trace says nothing of rounds 4 and later, but for c7
        expected = [client for client in IDS if client not in out.get(round_, {"c7"})]
        assert chosen(traced(tmp_path, TRACE), round_) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"the first line must be round,client \(given: \)"),
        ("client\nc1\n", r"the first line must be round,client \(given: client\)"),
        ("round;client\n1;c1\n", r"the first line must be round,client \(given: round;client\)"),
        ("round,site,why\n1,c1,x\n", r"must have the column 'client' once \(given: round,site,why\)"),
        ("round,client,client\n1,c1,c2\n", r"must have the column 'client' once"),
        ("round,client\n1,c1\n2,c99\n", r"line 3: there is no client 'c99'; allowed: c0, c1,"),
        ("round,client\n1,\n", r"line 2: there is no client ''; allowed: c0"),
        ("round,client\n-1,c1\n", r"line 2: round must be a whole number from 1, or \* .*\(given: -1\)"),
        ("round,client\n0,c1\n", r"line 2: round must be a whole number from 1"),
        ("round,client\n1.5,c1\n", r"line 2: round must be a whole number from 1"),
        ("round,client\n,c1\n", r"line 2: round must be a whole number from 1"),
        ("round,client\n3\n", r"line 2 needs round and client"),
        ("round,client\n3,c1,c2\n", r"line 2 needs round and client"),
        ("round,client\n3,c1\n3,c1\n", r"line 3: repeats client 'c1' of round 3; each may be listed once"),
    ],
)
def test_what_is_no_trace_is_one_line_with_file_and_row(tmp_path, text, message):
    with pytest.raises(
        PerfedError, match=rf"participation\.dropout_trace\.file = '.*dropouts\.csv': .*{message}"
    ) as error:
        selection(traced(tmp_path, text))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"policy": "dropout_trace"}, r"needs participation\.dropout_trace\.file, a CSV file"),
        ({"policy": "dropout_trace", "dropout_trace": {"file": "/no/such.csv"}}, "cannot be read: No such file"),
        (dropout(clients={"c99": 0.5}), r"participation\.dropout\.clients: there is no client 'c99'; allowed: c0, c1,"),
    ],
)
def test_settings_that_do_not_fit_the_clients_are_refused(policy, message):
    with pytest.raises(PerfedError, match=message):
        selection(policy)


@pytest.mark.parametrize("wrong", [{"probability": 1.5}, {"probability": -0.1}, {"clients": {"c1": 2.0}}, {"p": 0.5}])
def test_probabilities_are_from_0_to_1(wrong):
    with pytest.raises(ValueError, match=r"dropout\."):
        Participation(**dropout(**wrong))


@pytest.mark.parametrize("policy", ["dropout", "dropout_trace"])
def test_dropouts_are_the_same_on_any_engine(policy, tmp_path):
    settings = traced(tmp_path, "round,client\n1,c0\n2,c3\n") if policy == "dropout_trace" else dropout(probability=0.5)
    runs = []
    for options in ENGINES.values():
        server = serve(make("fedrep"), blobs((5, 4, 3, 6)), participation=Participation(**settings), **options)
        server.prepare()
        runs.append(([server.round(number).participants for number in (1, 2, 3)], server))
    assert all(used == runs[0][0] for used, _ in runs)
    assert any(len(used) < 4 for used in runs[0][0])
    assert all(difference(server, runs[0][1]) < 1e-8 for _, server in runs)


@pytest.mark.parametrize("policy", ["dropout", "dropout_trace"])
def test_settings_are_recorded_and_read_again(policy, tmp_path):
    made = Participation(**(traced(tmp_path, TRACE) if policy == "dropout_trace" else dropout(clients={"c1": 0.5})))
    assert Participation(**made.model_dump(exclude_none=True)) == made and policy in made.model_dump()
    assert policy not in Participation(policy="uniform").model_dump()


def test_at_real_sites_the_replies_of_those_that_drop_out_are_not_waited_for(tmp_path):
    invitation = create_invitation(selection(traced(tmp_path, "round,client\n1,c0\n"), ids=IDS[:3]), 1)
    assert invitation.ids == ("c0", "c1", "c2") and not invitation.strict
    assert not invitation.is_complete({"c0": 1.0, "c1": 2.0}) and invitation.is_complete({"c1": 1.0, "c2": 2.0})
    assert invitation.choose({"c0": 1.0, "c1": 2.0}) == (["c1"], ["c2"])


class Stop(Exception):
    """Ends a run in the middle."""


@pytest.mark.long
def test_a_run_is_resumed_to_the_same_bits_and_only_with_the_same_trace(tmp_path):
    policy = Participation(**traced(tmp_path, "round,client\n1,c0\n3,c1\n"))

    def run(directory=None) -> Run:
        federation = blobs((5, 4, 3))
        return Run(
            federation,
            make("fedrep"),
            build_network(),
            rounds=4,
            participation=policy,
            clock=FIXED,
            plan=Plan("stacked", threads=1),
            directory=directory,
        )

    def stop(number: int, *_: object) -> None:
        if number == 2:
            raise Stop

    whole = run()
    whole.execute()
    with pytest.raises(Stop):
        run(RunDirectory.create(tmp_path / "run")).execute(stop)
    resumed = run(RunDirectory(tmp_path / "run"))
    resumed.restore()
    resumed.execute()
    assert difference(resumed.server, whole.server) == 0
    assert np.array_equal([h["participants"] for h in resumed.history][2], ["c0", "c2"])
    traced(tmp_path, "round,client\n1,c0\n4,c1\n")
    with pytest.raises(PerfedError, match=r"dropouts\.csv: this run followed a trace with other dropouts"):
        run(RunDirectory(tmp_path / "run")).restore()
