"""What sites, the server and the network may do wrong, and what becomes of the run, which is beside each."""

from __future__ import annotations

import os
import random
import time
from math import inf, nan
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from engines import blobs, every_tensor, leaves, make, serve, train
from in_process_sites import RUN, Sites

from perfed.codec import encode, flatten
from perfed.engine.executor import LocalExecutor
from perfed.errors import PerfedError
from perfed.participation.invitation import create_invitation
from perfed.participation.policy import Policy, PolicySettings, register_policy, take_first
from perfed.participation.settings import Participation
from perfed.sites.flower.engine import Limits
from perfed.sites.flower.message import pack, unpack

SIZES = (12, 7, 5)
FIRST_TWO = Participation(policy="srpfl", srpfl={"first": 2, "rule": "fixed", "stage_rounds": 5})
DEADLINE = Participation(policy="deadline", deadline={"seconds": 10.0})


def sites(path, name="fedrep", **options) -> Sites:
    return Sites(path, make(name), blobs(SIZES), rounds=4, **options)


class Sends:
    """A site whose replies are changed on the way."""

    def __init__(self, site, change) -> None:
        self.site, self.change = site, change

    def answer(self, data: bytes) -> bytes:
        header, tree = unpack(self.site.answer(data))
        found = self.change(header, tree)
        return found if isinstance(found, bytes) else pack(header, tree)


def first_weight(tree) -> torch.Tensor:
    return next(t for name, t in flatten(tree).items() if name.endswith("weight"))


def nan_weight(header, tree):
    first_weight(tree).view(-1)[0] = nan


def infinite_weight(header, tree):
    first_weight(tree).view(-1)[-1] = inf


def other_shape(header, tree):
    shared = tree["reply"]["shared"]
    name = next(name for name in shared if name.endswith("weight"))
    shared[name] = shared[name].repeat(2, 1)


def other_type(header, tree):
    shared = tree["reply"]["shared"]
    shared.update({name: tensor.float() for name, tensor in shared.items()})


def one_less(header, tree):
    del tree["reply"]["num_samples"]


def ten_times(header, tree):
    return pack({**header, "padding": ""}, {"more": torch.zeros(10 * sum(t.numel() for _, t in leaves(tree))), **tree})


def old_sequence(header, tree):
    header["sequence"] -= 10_000


def other_site(header, tree):
    header["site"] = "c0"


def no_metrics(header, tree):
    del header["metrics"]


def metrics_of_text(header, tree):
    header["metrics"] = {"accuracy": "good"}


def accuracy_of_seven(header, tree):
    header["metrics"] = {"accuracy": 7.0}


def negative_auc(header, tree):
    header["metrics"] = {"accuracy": 0.5, "auc_all": -3}


def loss_without_a_number(header, tree):
    header["metrics"] = {"loss": nan}


def loss_that_is_no_float(header, tree):
    header["metrics"] = {"loss": 10**400}


def unknown_metric(header, tree):
    header["metrics"] = {"good\n" * 1000: 1.0}


def fewer_than_none(header, tree):
    tree["reply"]["num_samples"] = -tree["reply"]["num_samples"]


def very_many(header, tree):
    tree["reply"]["num_samples"] += 1.0


def large_weight(header, tree):
    first_weight(tree).view(-1)[0] = -1e30


def garbage(header, tree):
    return b"\x00" * 100


BAD = {
    nan_weight: "has 1 value that is not finite",
    infinite_weight: "has 1 value that is not finite",
    other_shape: "has shape",
    other_type: "is float32; float64 is expected",
    one_less: "lacks 'reply/num_samples'",
    ten_times: "'more', which is not expected",
    old_sequence: "sequence is 1; 10001 is expected",
    other_site: "site is 'c0'; 'c1' is expected",
    no_metrics: "metrics is missing from the header",
    metrics_of_text: "metrics must be a table of numbers by name",
    accuracy_of_seven: "metric 'accuracy' is 7.0; a number from 0 to 1 is needed",
    negative_auc: "metric 'auc_all' is -3; a number from 0 to 1 is needed",
    loss_without_a_number: "metric 'loss' is nan; a number from 0 to inf is needed",
    loss_that_is_no_float: "metric 'loss' is 1000000000000000000000000000000000000000; a number from 0 to inf",
    unknown_metric: "metric 'good",
    fewer_than_none: "entry 'reply/num_samples' is -7; the site has announced 7 training samples",
    very_many: "entry 'reply/num_samples' is 8; the site has announced 7 training samples",
    large_weight: "is 1e+30; at most ",
    garbage: "these bytes are not a message",
}


@pytest.mark.long
@pytest.mark.parametrize("change", BAD, ids=lambda change: change.__name__)
def test_a_bad_reply_is_refused_by_name_and_the_round_goes_on_where_the_policy_allows(change, tmp_path):
    """With SRPFL's first two of three the round uses the two others; with everybody it ends, and names the site."""
    going = sites(tmp_path / "some", participation=FIRST_TWO)
    going.transport.first = ["c1"]
    going.transport.at["c1"] = Sends(going.transport.at["c1"], change)
    going.server.prepare()
    record = going.server.round(1)
    assert record.participants == ["c0", "c2"] and record.counts == {"refused": ["c1"]}
    strict = sites(tmp_path / "all")
    strict.transport.at["c1"] = Sends(strict.transport.at["c1"], change)
    strict.server.prepare()
    before = dict(strict.server.sets["shared"])
    with pytest.raises(PerfedError, match="round 1: refused: the reply of site 'c1'") as caught:
        strict.server.round(1)
    assert BAD[change] in str(caught.value) and strict.server.sets["shared"] == before


@pytest.mark.long
@pytest.mark.parametrize("others", [1, 2])
def test_the_site_that_sent_anchors_of_1e30_is_named_and_the_others_go_on(others, tmp_path):
    """Not the site whose loss they make infinite; of two sites neither has a majority."""
    federation = blobs(SIZES[: others + 1], dims=(4, 3, 4)[: others + 1])
    going = Sites(tmp_path, make("flic-hl"), federation, rounds=4, limits=Limits(least=others))
    going.server.prepare()
    going.server.round(1)
    sends = Sends(going.transport.at["c1"], lambda header, tree: enlarge(tree["reply"].get("extensions", {})))
    going.transport.at["c1"] = sends
    record = going.server.round(2)
    assert record.counts == {"refused": ["c1"]} and "c1" not in record.participants
    strict = Sites(tmp_path / "all", make("flic-hl"), federation, rounds=4)
    strict.transport.at["c1"] = Sends(strict.transport.at["c1"], sends.change)
    with pytest.raises(PerfedError, match="refused: the reply of site 'c1': the norm of entry 'reply/extensions/"):
        train(strict.server, 1)
    free = Sites(tmp_path / "free", make("flic-hl"), federation, rounds=4, limits=Limits(ratio=None))
    free.transport.at["c1"] = Sends(free.transport.at["c1"], sends.change)
    free.server.prepare()
    free.server.round(1)


def enlarge(tree) -> None:
    for _, tensor in leaves(tree):
        if tensor.is_floating_point():
            tensor.fill_(1e30)


@pytest.mark.long
def test_a_policy_waits_for_another_reply_in_the_place_of_one_that_is_too_large(tmp_path):
    going = sites(tmp_path, participation=FIRST_TWO)
    going.transport.at["c0"] = Sends(going.transport.at["c0"], large_weight)
    going.server.prepare()
    record = going.server.round(1)
    assert record.participants == ["c1", "c2"] and record.counts == {"refused": ["c0"]}


@pytest.mark.long
def test_a_silent_site_is_named_by_full_participation_and_left_out_by_others(tmp_path):
    strict = sites(tmp_path / "all")
    strict.transport.silent = {"c1"}
    with pytest.raises(PerfedError, match="round 1: site 'c1' has not answered within 600 seconds"):
        train(strict.server, 1)
    for policy, seconds in ((FIRST_TWO, 3.0), (DEADLINE, 10.0)):
        going = sites(tmp_path / policy.policy, participation=policy)
        going.transport.silent = {"c1"}
        going.server.prepare()
        record = going.server.round(1)
        assert record.participants == ["c0", "c2"]
        assert record.seconds <= seconds and set(record.replied) == {"c0", "c2"}


@pytest.mark.long
def test_a_round_without_any_reply_changes_nothing(tmp_path):
    going = sites(tmp_path, participation=DEADLINE)
    going.server.prepare()
    before = dict(going.server.sets["shared"])
    going.transport.silent = {"c0", "c1", "c2"}
    record = going.server.round(1)
    assert record.participants == [] and going.server.sets["shared"] == before
    assert record.counts == {"no_reply": ["c0", "c1", "c2"]}


@pytest.mark.long
def test_the_first_replies_are_used_and_the_others_dropped(tmp_path):
    """What an unused site has trained is not committed: it starts its next round from where it last was used."""
    going = sites(tmp_path, participation=FIRST_TWO)
    going.transport.first = ["c2", "c1"]
    going.server.prepare()
    assert going.server.round(1).participants == ["c1", "c2"]
    going.transport.first = ["c0", "c2"]
    assert going.server.round(2).participants == ["c0", "c2"]
    bases = {site: unpack(data)[0]["base"] for site, data in going.transport.sent if unpack(data)[0]["round"] == 2}
    assert bases == {"c0": 0, "c2": 10_001}
    assert going.server.selection.policy.state["rounds"] == 2


@pytest.mark.long
def test_policies_decide_before_all_have_replied(tmp_path):
    going = sites(tmp_path, participation=FIRST_TWO)
    invitation = create_invitation(going.server.selection, 1)
    assert invitation.ids == ("c0", "c1", "c2")
    assert not invitation.is_complete({"c1": 1.0}) and invitation.is_complete({"c1": 1.0, "c2": 2.0})
    waiting = create_invitation(sites(tmp_path / "deadline", participation=DEADLINE).server.selection, 1)
    assert not waiting.is_complete({"c1": 1.0, "c2": 2.0}) and waiting.limit == 10.0


@pytest.mark.long
def test_a_site_whose_state_is_lost_says_so(tmp_path):
    going = sites(tmp_path)
    train(going.server, 1)
    for file in (tmp_path / "c1" / RUN).glob("*.exchange"):
        file.unlink()
    with pytest.raises(PerfedError, match="the state after exchange 10001 is missing"):
        going.server.round(2)


@pytest.mark.long
def test_a_message_that_is_sent_again_gets_the_first_reply_and_trains_nothing(tmp_path):
    going = sites(tmp_path)
    train(going.server, 1)
    name, data = going.transport.sent[-1]
    file = going.stores[name].path / "000000010001.exchange"
    before = file.stat().st_mtime_ns
    assert going.transport.at[name].answer(data) == going.transport.came[-1][1]
    assert file.stat().st_mtime_ns == before


@pytest.mark.long
def test_an_evaluation_that_is_sent_again_is_not_made_again(tmp_path, monkeypatch):
    """It leaves no state on disk; another split is another question."""
    federation = blobs(SIZES, validation=3)
    going, ran = Sites(tmp_path, make("fedrep"), federation, rounds=4, validated=True), []
    train(going.server, 1)
    run = LocalExecutor.run
    monkeypatch.setattr(LocalExecutor, "run", lambda host, work: ran.append(1) or run(host, work))
    going.server.evaluate("test", round_=1)
    name, data = going.transport.sent[-1]
    made = len(ran)
    assert going.transport.at[name].answer(data) == going.transport.came[-1][1] and len(ran) == made > 0
    going.server.evaluate("validation", round_=1)
    assert len(ran) == made + len(SIZES)


def run_on(path, method: str, rounds: int) -> None:
    """A whole run, or the rest of one, in this process; its last state is written to ``path/end``."""
    torch.set_num_threads(1)
    going = Sites(path, make(method), blobs(SIZES), rounds=rounds)
    saved = path / "checkpoint.pt"
    number = -1
    if saved.exists():
        held = torch.load(saved, weights_only=False)
        number = held["number"]
        going.server.restore(held["snapshot"])
    while number < rounds:
        number += 1
        going.server.round(number) if number else going.server.prepare()
        torch.save({"number": number, "snapshot": going.server.snapshot()}, path / "new.pt")
        os.replace(path / "new.pt", saved)
    states = {client: going.state(client) for client in going.stores}
    torch.save({"server": going.server.sets, "sites": states}, path / "end.pt")


@pytest.mark.long
@pytest.mark.parametrize("method", ["feddar-sa", "ditto"])
def test_a_run_whose_server_and_sites_are_killed_at_any_moment_ends_with_the_same_bits(method, tmp_path):
    """SIGKILL of everything at 20 random moments: journal, states and checkpoint bring it to the same end."""
    federation = blobs(SIZES)
    expected = every_tensor(train(serve(make(method), federation, engine="sequential", rounds=3), 3))
    generator, kills = random.Random(0), 0
    while not (tmp_path / "end.pt").exists():
        child = get_context("fork").Process(target=run_on, args=(tmp_path, method, 3))
        child.start()
        if kills < 20:
            time.sleep(generator.uniform(0.01, 0.3))
            child.kill()
            kills += 1
        child.join()
    found = torch.load(tmp_path / "end.pt", weights_only=False)
    for path, tensor in leaves(found["server"]):
        assert torch.equal(tensor, expected[("server", *path.split("/"))]), path
    for client, state in found["sites"].items():
        for path, tensor in leaves(state):
            assert torch.equal(tensor, expected[(client, *path.split("/"))]), (client, path)


def test_a_round_to_which_a_policy_invites_nobody_changes_nothing(tmp_path, forgotten):
    @register_policy("nobody")
    class Nobody(Policy[PolicySettings]):
        def select(self, round_, ask):
            return take_first(ask(np.zeros(0, int)))

    sites = Sites(tmp_path, make("fedavg"), blobs((6, 5)), participation=Participation(policy="nobody"))
    before = encode(sites.server.sets)
    record = sites.server.round(1)
    assert record.participants == [] and record.exchanges == 0 and encode(sites.server.sets) == before
