"""Rounds whose server sees sums alone: over messages, in a simulation, and with sites that drop out."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch
from engines import blobs, leaves, make, quick, serve, train
from in_process_sites import Sites

from perfed.engine.secure_aggregation import SecureAggregation
from perfed.errors import PerfedError
from perfed.maths.sums import SingleReplies
from perfed.method.extension import extension_class
from perfed.method.registry import known_names
from perfed.methods.fedavg import FedAvg
from perfed.participation.settings import Participation
from perfed.sites.flower.message import pack, unpack
from perfed.sites.flower.refusal import RefusalReason

SECURE = SecureAggregation()
SINGLE = ["boost", "fedamp", "feddar-sa", "fedfomo", "fedpac", "fedpac-cc", "forest", "hypcluster", "mixed", "pfedhn"]
PROJECTS = "fedrep-tsne"  # the data of all clients together, which no site has


def worst(one, other) -> float:
    """The largest difference of what two servers have."""
    pairs = zip(leaves(one.state.tree()), leaves(other.state.tree()), strict=True)
    return max((float((a.double() - b.double()).abs().max()) for (_, a), (_, b) in pairs if a.numel()), default=0.0)


@pytest.mark.long
@pytest.mark.every_method("name")
@pytest.mark.parametrize("name", [name for name in known_names() if name not in (*SINGLE, PROJECTS)])
def test_sums_under_masks_are_those_of_a_simulation_and_the_plain_ones_to_the_quantisation(name, tmp_path):
    """A mean of three clients is at most 2^-25 from the plain one in each round, and two rounds of training follow."""
    federation = blobs((12, 7, 5), dims=(4,))
    # A weight with no gradient but MR-MTL's pull has one of rounding alone, of which Adam makes a whole step.
    given = {"optimizer": "sgd"} if name == "mr-mtl" else {}
    sites = Sites(tmp_path, make(name, **given), federation, rounds=2, secure=SECURE)
    train(sites.server, 2)
    simulated = train(serve(make(name, **given), federation, engine="sequential", rounds=2, secure=SECURE), 2)
    plain = train(serve(make(name, **given), federation, engine="sequential", rounds=2), 2)
    assert worst(sites.server, simulated) == 0
    assert worst(sites.server, plain) < 2**-22
    assert sites.server.evaluate("test", round_=2) == simulated.evaluate("test", round_=2)


@pytest.mark.parametrize("name", SINGLE)
def test_methods_whose_server_needs_single_replies_are_refused_before_anything_is_sent(name, tmp_path):
    with pytest.raises(SingleReplies, match=r"^secure aggregation: the server has sums over clients alone") as error:
        Sites(tmp_path, make(name), blobs((12, 7, 5), dims=(4,)), rounds=2, secure=SECURE)
    assert "\n" not in str(error.value)


def test_an_extension_that_must_see_single_replies_is_refused(tmp_path):
    sparse = quick(FedAvg, extensions=(extension_class("top-k")(),))
    with pytest.raises(SingleReplies, match="extension 'top-k'"):
        Sites(tmp_path, sparse, blobs((12, 7), dims=(4,)), secure=SECURE)


def test_a_policy_that_chooses_among_replies_and_too_few_clients_are_refused():
    for participation, said in (
        (Participation(policy="srpfl"), "participation.policy = 'srpfl' chooses among single replies"),
        (Participation(rate=0.3), "a round asks 1 of 5 clients, and a sum needs 2"),
    ):
        with pytest.raises(PerfedError, match=said):
            SECURE.check(participation, 5, by_name=False)
    with pytest.raises(PerfedError, match="a sum needs 6"):
        SecureAggregation(threshold=6).check(Participation(), 5, by_name=False)
    with pytest.raises(SingleReplies, match="'named'"):
        SECURE.check(Participation(), 5, by_name=True)


@pytest.mark.long
def test_a_server_without_values_still_learns_the_mean_loss(tmp_path):
    federation = blobs((12, 7, 5), dims=(4,))
    sites = Sites(tmp_path, make("fedavg"), federation, secure=SECURE)
    plain = serve(make("fedavg"), federation, engine="sequential")
    sites.server.prepare(), plain.prepare()
    assert sites.server.round(1).train_loss == pytest.approx(plain.round(1).train_loss, abs=1e-6)


@pytest.mark.long
def test_what_leaves_a_site_in_a_round_is_a_vector_of_whole_numbers(tmp_path):
    sites = Sites(tmp_path, make("fedavg"), blobs((12, 7, 5), dims=(4,)), secure=SECURE)
    train(sites.server, 1)
    done = [unpack(reply) for _, reply in sites.transport.came if unpack(reply)[0]["kind"] == "done"]
    assert done and all([*tree] == ["masked"] and tree["masked"].dtype == torch.int64 for _, tree in done)
    first, second = (tree["masked"] for _, tree in done[:2])
    assert not (first == second).any()


def silent_from(sites: Sites, phase: str, names: tuple[str, ...]) -> None:
    """Let sites be silent once they get a message of the phase."""
    deliver = sites.transport.exchange

    def exchange(messages, deadline, least=0):
        if unpack(next(iter(messages.values())))[0]["kind"] == phase:
            sites.transport.silent |= set(names)
        yield from deliver(messages, deadline, least)

    sites.transport.exchange = exchange


PHASES = ("keys", "shares", "work", "unmask")


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
def test_a_site_that_drops_out_in_any_phase_is_survived(phase, tmp_path):
    """The model is that of the sites whose replies have arrived, as if the others were not there."""
    federation = blobs((12, 7, 5, 9), dims=(4,))
    sites = Sites(tmp_path, make("fedavg"), federation, secure=SecureAggregation(threshold=3))
    sites.server.prepare()
    silent_from(sites, phase, ("c1",))
    record = sites.server.round(1)
    used = [i for i in federation.ids if i != "c1" or phase == "unmask"]
    rest = replace(federation, clients=tuple(client for client in federation if client.id in used))
    assert record.participants == used
    assert worst(sites.server, train(serve(make("fedavg"), rest, engine="sequential"), 1)) < 2**-22


@pytest.mark.long
def test_sites_that_drop_out_one_after_the_other_before_all_have_shared_are_survived(tmp_path):
    """The server begins again with the rest each time, and asks no site twice for shares of one attempt."""
    federation = blobs((12, 7, 5, 9, 8), dims=(4,))
    sites = Sites(tmp_path, make("fedavg"), federation, secure=SecureAggregation(threshold=3))
    sites.server.prepare()
    deliver, going = sites.transport.exchange, ["c4", "c1"]

    def exchange(messages, deadline, least=0):
        if unpack(next(iter(messages.values())))[0]["kind"] == "shares" and going:
            sites.transport.silent.add(going.pop())
        yield from deliver(messages, deadline, least)

    sites.transport.exchange = exchange
    used = ["c0", "c2", "c3"]
    assert sites.server.round(1).participants == used and not going
    rest = replace(federation, clients=tuple(client for client in federation if client.id in used))
    assert worst(sites.server, train(serve(make("fedavg"), rest, engine="sequential"), 1)) < 2**-22


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
def test_with_fewer_than_the_threshold_the_round_is_void_and_the_next_one_is_not(phase, tmp_path):
    federation, notes = blobs((12, 7, 5, 9), dims=(4,)), list[str]()
    sites = Sites(tmp_path, make("fedavg"), federation, secure=SecureAggregation(threshold=3))
    sites.transport.note = notes.append
    sites.server.prepare()
    before = [tensor.clone() for _, tensor in leaves(sites.server.state.tree())]
    silent_from(sites, phase, ("c1", "c3"))
    record = sites.server.round(1)
    assert record.participants == [] and not sites.server.engine.states
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, leaves(sites.server.state.tree()), strict=True))
    (note,) = notes
    assert note.startswith("round 1 is void: 2 of 4 ") and "\n" not in note
    sites.transport.silent.clear()
    del sites.transport.exchange  # the class's own again
    assert sites.server.round(2).participants == federation.ids


@pytest.mark.long
def test_what_all_sites_must_do_still_needs_all_of_them(tmp_path):
    sites = Sites(tmp_path, make("feddbe"), blobs((12, 7, 5, 9), dims=(4,)), secure=SECURE)
    sites.transport.silent = {"c2"}
    with pytest.raises(PerfedError, match="round 0: site 'c2'"):
        sites.server.prepare()


@pytest.mark.long
def test_a_server_that_is_killed_before_it_opens_the_sum_goes_on_to_the_same_bits(tmp_path):
    """And sites are not asked to open another one."""
    federation = blobs((12, 7, 5), dims=(4,))
    whole = Sites(tmp_path / "whole", make("fedavg"), federation, secure=SECURE)
    train(whole.server, 2)
    killed = Sites(tmp_path / "killed", make("fedavg"), federation, secure=SECURE)
    killed.kill_server("unmask", replies=1)  # one has opened it already
    killed.server.round(1), killed.server.round(2)
    assert worst(killed.server, whole.server) == 0


@pytest.mark.long
@pytest.mark.parametrize("rate", [1.0, 0.6])
def test_a_server_that_is_killed_after_masked_replies_goes_on_with_other_keys(rate, tmp_path):
    """Sites have noted whom the server has asked, and it asks the same ones; their first vectors are of no use."""
    federation, who = blobs((12, 7, 5, 9, 8), dims=(4,)), Participation(rate=rate)
    whole = Sites(tmp_path / "whole", make("fedavg"), federation, secure=SECURE, participation=who)
    train(whole.server, 2)
    killed = Sites(tmp_path / "killed", make("fedavg"), federation, secure=SECURE, participation=who)
    killed.kill_server("work", replies=2)
    killed.server.round(1), killed.server.round(2)
    assert worst(killed.server, whole.server) == 0


@pytest.mark.long
def test_where_a_round_asks_some_sites_a_void_round_does_not_end_the_run(tmp_path):
    """Sites that have put a reply under masks refuse the same payload with others; those that have not go on."""
    federation, who = blobs((12, 7, 5, 9, 8, 6, 11, 10), dims=(4,)), Participation(rate=3 / 8)
    sites, notes = Sites(tmp_path, make("fedavg"), federation, secure=SECURE, participation=who), list[str]()
    sites.transport.note = notes.append
    train(sites.server, 1)
    silent_from(sites, "unmask", tuple(federation.ids))
    assert sites.server.round(2).participants == []
    del sites.transport.exchange
    sites.transport.silent.clear()
    counts = [len(sites.server.round(number).participants) for number in range(3, 10)]
    first = next(place for place, count in enumerate(counts) if count)
    assert first < 4 and set(counts[first + 1 :]) == {3}  # after a sum the payload is another one
    assert len(notes) == 1 + first


@pytest.mark.long
def test_a_round_after_a_void_one_does_what_the_void_one_would_have_done(tmp_path):
    """Sites have noted their replies to the same payload; every sum is of all sites, so they need one history."""
    federation, secure = blobs((12, 7, 5), dims=(4,)), SecureAggregation(threshold=3)
    whole = Sites(tmp_path / "whole", make("fedrep"), federation, secure=secure)
    train(whole.server, 1)
    sites = Sites(tmp_path / "void", make("fedrep"), federation, secure=secure)
    sites.server.prepare()
    silent_from(sites, "unmask", ("c1",))
    assert sites.server.round(1).participants == []
    del sites.transport.exchange
    sites.transport.silent.clear()
    assert sites.server.round(2).participants == federation.ids
    assert worst(sites.server, whole.server) == 0
    assert sites.server.round(3).participants == federation.ids


def lose_replies(sites: Sites, name: str) -> None:
    """Let the masked replies of a site be lost on their way."""
    deliver = sites.transport.exchange

    def exchange(messages, deadline, least=0):
        for answer in deliver(messages, deadline, least):
            lost = answer.site == name and "secure" in unpack(messages[name])[0]
            yield replace(answer, body=None, error=f"site '{name}' is away") if lost else answer

    sites.transport.exchange = exchange


@pytest.mark.long
def test_a_site_whose_reply_was_lost_returns_with_a_shorter_history(tmp_path):
    federation = blobs((12, 7, 5, 9), dims=(4,))
    sites = Sites(tmp_path, make("fedrep"), federation, secure=SecureAggregation(threshold=3))
    sites.server.prepare()
    lose_replies(sites, "c1")
    assert sites.server.round(1).participants == ["c0", "c2", "c3"]
    del sites.transport.exchange
    assert sites.server.round(2).participants == sites.server.round(3).participants == federation.ids


@pytest.mark.long
def test_sites_that_take_part_in_different_rounds_have_different_histories(tmp_path):
    federation, who = blobs((12, 7, 5, 9, 8), dims=(4,)), Participation(rate=0.6)
    sites = Sites(tmp_path, make("fedrep"), federation, secure=SECURE, participation=who)
    sites.server.prepare()
    assert [len(sites.server.round(number).participants) for number in range(1, 6)] == [3] * 5
    assert len({sites.server.engine.states[name]["sequence"].item() for name in sites.server.engine.states}) > 1


@pytest.mark.long
@pytest.mark.parametrize("secure", [SECURE, SecureAggregation(threshold=3)])
def test_a_second_run_of_a_study_comes_to_the_same_bits(secure, tmp_path):
    federation = blobs((12, 7, 5), dims=(4,))
    servers = []
    for run in ("first", "second"):
        sites = Sites(tmp_path, make("fedrep"), federation, secure=secure, run=run)
        sites.journal.path = tmp_path / f"journal of {run}"
        sites.journal.path.mkdir()
        servers.append(train(sites.server, 2))
        sites.close()
    assert worst(*servers) == 0 and len({*(tmp_path / "c0" / ".sums").iterdir()}) > 0


class Asking:
    """A site, and a server that does what it likes."""

    def __init__(self, sites: Sites, sequence: int = 10_001) -> None:
        self.sites, self.fields = sites, {"run": "run", "sequence": sequence, "attempt": "a"}

    def ask(self, site: str, kind: str, **fields):
        return unpack(self.sites.transport.at[site].answer(pack({"kind": kind, **self.fields, **fields}, {})))[0]


@pytest.mark.long
def test_a_site_opens_one_sum_of_an_exchange_and_no_second_one(tmp_path):
    """With two sums, of three and of two sites, a server would have the reply of the third."""
    sites = Sites(tmp_path, make("fedavg"), blobs((12, 7, 5), dims=(4,)), secure=SECURE)
    train(sites.server, 1)
    with pytest.raises(PerfedError, match="has been opened") as error:
        Asking(sites).ask("c0", "keys", asked=["c0", "c1"], request="")
    assert error.value.reason == RefusalReason.SUM


@pytest.mark.long
def test_a_site_gives_its_reply_to_no_server_that_asks_without_a_sum(tmp_path):
    sites = Sites(tmp_path, make("fedavg"), blobs((12, 7, 5), dims=(4,)), secure=SECURE)
    train(sites.server, 1)
    name, asked = next((n, m) for n, m in sites.transport.sent if unpack(m)[0].get("secure"))
    header, tree = unpack(asked)
    for secure in (None, {"attempt": "another", "sealed": {}}, 3):
        changed = {k: v for k, v in header.items() if k != "secure"} | ({} if secure is None else {"secure": secure})
        with pytest.raises(PerfedError) as error:
            sites.transport.at[name].answer(pack(changed, tree))
        assert error.value.reason == RefusalReason.SUM


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("keys", {"asked": ["c0"]}, "a sum of 1 sites"),
        ("keys", {"asked": ["c0", "c1", "c2", "c3"]}, "a sum of 4 sites; the study has 3"),
        ("keys", {"asked": ["c0", "c0", "c1"]}, "a sum of 3 sites; the study has 3, each counts once"),
        ("keys", {"asked": ["c1", "c2"]}, "without this site"),
        ("keys", {"asked": "3"}, "asked is '3'; names of sites are needed"),
        ("keys", {"asked": ["c0", 3]}, "names of sites are needed"),
        ("keys", {"asked": ["c0", "c1"], "request": None, "payload": ""}, "request and payload are None and ''"),
        ("keys", {"asked": ["c0", "c1"], "request": "", "payload": ["x"]}, "hashes are needed"),
        ("shares", {"number": 1, "keys": {}}, "is not in progress at this site"),
        ("unmask", {"arrived": [1, 2]}, "is not in progress at this site"),
        ("unmask", {"arrived": "all"}, "numbers of members are needed"),
        ("keys", {"asked": ["c0", "c1"], "run": "other"}, "run is 'other'"),
        ("keys", {"asked": ["c0", "c1"], "sequence": "x"}, "sequence is 'x'"),
    ],
)
def test_messages_that_are_not_of_the_protocol_are_refused(kind, fields, said, tmp_path):
    sites = Sites(tmp_path, make("fedavg"), blobs((12, 7, 5), dims=(4,)), secure=SECURE)
    with pytest.raises(PerfedError, match=said):
        Asking(sites).ask("c0", kind, **fields)


@pytest.mark.long
def test_a_value_that_does_not_fit_into_a_sum_is_refused_at_its_site(tmp_path):
    """2^22 is the most that a sum of three with 40 bits behind the point can hold of each."""
    federation = blobs((12, 7, 5), dims=(4,))
    sites = Sites(tmp_path, make("fedavg"), federation, secure=SecureAggregation(bits=40))
    sites.server.prepare()
    shared = sites.server.state.shared
    sites.server.state.shared = {name: t + 1e7 for name, t in shared.items()}
    sites.server.round(1)
    assert sites.server.drain_notes()[0].startswith("round 1 is void: 0 of 3 sites are left, and a sum needs 2: ")


@pytest.mark.long
def test_a_masked_message_does_not_repeat_itself(tmp_path):
    """A round that is done again is done under other masks."""
    sent = []
    for attempt in ("one", "two"):
        sites = Sites(tmp_path / attempt, make("fedavg"), blobs((12, 7, 5), dims=(4,)), secure=SECURE)
        train(sites.server, 1)
        sent += [hashlib.sha256(r).hexdigest() for _, r in sites.transport.came if unpack(r)[0]["kind"] == "done"]
    assert len(set(sent)) == len(sent)
