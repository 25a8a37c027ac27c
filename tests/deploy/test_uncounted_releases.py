"""A curious server asks for more than a round, or for studies of both units, to be told more than the ledger counts."""

from __future__ import annotations

from contextlib import closing

import pytest
from stations import answer_all, study
from test_noise_binding import PRIVATE, Recorder, replies_of

from perfed.deploy.policy import Policy
from perfed.deploy.spending import LEDGER, ledger, total
from perfed.engine.flower.message import pack, unpack
from perfed.engine.flower.refusal import Said
from perfed.errors import PerfedError

FEDREP = {"method": "fedrep", "methods": {"fedrep": {"placement": {"embedding": "personal"}}}}


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
    (line,) = ledger(tables / "at-north")
    assert settled["kind"] == "done"
    assert line.releases == {"number of rows": 1, "number of classes": 1, "10001": 1, "13001": 1}
    assert trained["error"] == Said.BUDGET  # of two rounds in all


def test_runs_that_protect_clients_count_to_what_is_told_of_a_row(tables):
    """Studies of both units, one after the other, share the budget of a policy."""
    policy = Policy(epsilon=7.0)
    private = study(tables, **PRIVATE)
    with closing(Recorder(tables, private, policy)) as stations:
        answer_all(tables, private, stations)
    before = total(ledger(tables / "at-north"), "sample", 1e-3)
    other = study(tables, **{**PRIVATE, **FEDREP, "privacy": {"unit": "client", "epsilon": 6.0, "delta": 1e-3}})
    told = pack({"kind": "study", "run": "another", "study": other, "site": "north"}, {})
    (refused,) = replies_of(tables, other, told, policy=policy)
    assert before < 7.0 and str(refused.get("error", "")).startswith(Said.POLICY)


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
    with pytest.raises(PerfedError, match=r"lacks what run '.*' was told, whose exchanges this site has answered"):
        ledger(tables / "at-north")
