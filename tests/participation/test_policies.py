"""Participation policies: who is used, how long it takes, and what stays as it was."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from engines import ENGINES, blobs, cohort, difference, every_tensor, make, network, network_for, quick, serve, train
from pydantic import ValidationError
from scipy import stats

from perfed import rng
from perfed.data.federation import Federation
from perfed.engine.builtin_programs import gradient
from perfed.engine.server import Server
from perfed.errors import PerfedError
from perfed.methods.flic.anchors import Anchors
from perfed.model.chain import Model
from perfed.model.presets import linear
from perfed.participation.clock import Clock, Population
from perfed.participation.policy import Arrivals, take_first, take_without
from perfed.participation.schedule import stage_lengths
from perfed.participation.selection import Selection
from perfed.participation.settings import Participation
from perfed.run.run import Run
from perfed.run.settings import Evaluation

IDS = tuple(f"c{i}" for i in range(10))


def selection(policy: dict, clock: dict | None = None, *, ids=IDS, sizes=None, seed=0, rounds=99) -> Selection:
    sizes = np.full(len(ids), 10) if sizes is None else np.array(sizes)
    who = Population(tuple(ids), rng.encode_texts(ids), sizes, sizes)
    return Selection(Participation(**policy), Clock(**(clock or {})), who, seed, rounds)


def chosen(policy: dict, round_: int, *, seed: int = 0, rounds: int = 99, ids=IDS) -> list[str]:
    return selection(policy, seed=seed, rounds=rounds, ids=ids).choose(round_).ids


# Uniform participation -------------------------------------------------------------------------------------------


def test_the_right_number_of_different_clients_in_sorted_order():
    for rate, count in [(0.1, 1), (0.05, 1), (0.3, 3), (0.39, 3), (0.7, 7), (0.999, 9), (1.0, 10)]:
        found = chosen({"rate": rate}, 1)
        assert len(found) == len(set(found)) == count and found == sorted(found) and set(found) <= set(IDS)


def test_the_last_round_is_for_everybody_unless_asked_otherwise():
    assert chosen({"rate": 0.2}, 50, rounds=50) == list(IDS)
    assert len(chosen({"rate": 0.2}, 49, rounds=50)) == 2
    assert len(chosen({"rate": 0.2, "last_round": "sampled"}, 50, rounds=50)) == 2


def test_the_choice_depends_on_seed_and_round():
    choices = {tuple(chosen({"rate": 0.3}, round_, seed=seed)) for seed in range(5) for round_ in range(1, 5)}
    assert len(choices) > 10


@pytest.mark.long
def test_every_client_is_as_likely_as_any_other():
    counts = Counter(
        c for seed in range(2) for round_ in range(500) for c in chosen({"rate": 0.2}, round_, seed=seed, rounds=999)
    )
    assert sum(counts.values()) == 2000
    assert stats.chisquare([counts[c] for c in IDS]).pvalue > 1e-3
    pairs = Counter(tuple(chosen({"rate": 0.2}, round_, seed=7, rounds=9999)) for round_ in range(1000))
    assert len(pairs) == 45  # every pair occurs


# SRPFL -----------------------------------------------------------------------------------------------------------


def srpfl(**own) -> dict:
    return {"policy": "srpfl", "srpfl": {"first": 2, "rule": "fixed", "stage_rounds": 3, **own}}


def play(policy: dict, clock: dict | None = None, *, rounds: int = 12, losses=None, **options) -> list:
    """The choices of a run whose training loss is ``losses``."""
    held = selection(policy, clock, **options)
    found = []
    for number in range(1, rounds + 1):
        found.append(held.choose(number))
        held.policy.observe(1.0 if losses is None else losses[number - 1], None, 10)
    return found


def test_srpfl_uses_the_first_replies_and_doubles_their_number_after_each_stage():
    found = play(srpfl(), {"speeds": "dynamic", "communication": 0.5})
    assert [len(choice.ids) for choice in found] == [2] * 3 + [4] * 3 + [8] * 3 + [10] * 3
    for choice in found:
        fastest = sorted(choice.replied, key=choice.replied.__getitem__)[: len(choice.ids)]
        assert len(choice.replied) == 10 and choice.ids == sorted(fastest)
        assert choice.seconds == max(choice.replied[client] for client in choice.ids) > 0.5


def test_srpfl_samples_its_clients_from_all():
    found = play({**srpfl(), "rate": 0.5, "last_round": "sampled"}, {"speeds": "dynamic"})
    assert [len(choice.ids) for choice in found] == [2] * 3 + [4] * 3 + [5] * 6
    assert all(len(choice.replied) == 5 for choice in found)
    assert len({frozenset(choice.replied) for choice in found}) > 8
    by_stage = play({**srpfl(redraw="stage"), "rate": 0.5}, {"speeds": "dynamic"}, rounds=9)
    assert [len({frozenset(c.replied) for c in by_stage[i : i + 3]}) for i in (0, 3, 6)] == [1, 1, 1]
    assert by_stage[0].replied.keys() != by_stage[3].replied.keys()


def test_the_last_stage_lasts_to_the_end():
    policy = {**srpfl(redraw="stage"), "rate": 0.5}  # with 2, 4 and all 5 of the invited clients
    found = play(policy, {"speeds": "dynamic"}, rounds=30)
    assert {tuple(choice.ids) for choice in found[6:]} == {tuple(found[6].ids)} and len(found[6].ids) == 5
    assert len(found[-1].replied) == 5  # also in the last round
    found = play(srpfl(double="samples", stage_rounds=1), rounds=200)
    assert len(found[-1].ids) == 10


def test_replies_of_the_same_moment_are_not_taken_in_the_order_of_the_ids():
    counts = Counter(client for choice in play(srpfl(stage_rounds=400), rounds=400) for client in choice.ids)
    assert stats.chisquare([counts[c] for c in IDS]).pvalue > 1e-3


def test_stage_lengths_may_be_a_list_or_come_from_the_theory_or_from_the_training_loss():
    sizes = [len(choice.ids) for choice in play(srpfl(stage_rounds=[1, 4, 2]), rounds=10)]
    assert sizes == [2] + [4] * 4 + [8] * 2 + [10] * 3
    lengths = stage_lengths(10, 2, 0.25, excess=1.2)
    theory = {"rule": "theory", "stage_rounds": None, "contraction": 0.25, "excess": 1.2}
    total = sum(lengths[:3])
    sizes = [len(choice.ids) for choice in play(srpfl(**theory), rounds=total + 1)]
    assert sizes == [2] * lengths[0] + [4] * lengths[1] + [8] * lengths[2] + [10]
    losses = [5.0, 4.0, 4.0, 3.999, 9.0, 2.0, 2.0, 2.1, 2.0]  # two rounds without 1 % less end a stage
    plateau = srpfl(rule="plateau", stage_rounds=None, patience=2, tolerance=0.01)
    sizes = [len(choice.ids) for choice in play(plateau, rounds=9, losses=losses)]
    assert sizes == [2] * 4 + [4] * 4 + [8]


def test_srpfl_can_double_the_samples_instead_of_the_clients():
    sizes = np.random.default_rng(0).integers(1, 100, 10) ** 2
    found = play(srpfl(double="samples"), {"speeds": "fixed"}, sizes=sizes)
    held = {client: int(size) for client, size in zip(IDS, sizes, strict=True)}
    order = sorted(found[0].replied, key=found[0].replied.__getitem__)
    base = held[order[0]] + held[order[1]]
    for stage in range(4):
        wanted = min(base * 2**stage, int(sizes.sum()))
        used, total = [], 0
        for client in order:
            if total < wanted:
                used, total = [*used, client], total + held[client]
        assert {tuple(choice.ids) for choice in found[3 * stage : 3 * stage + 3]} == {tuple(sorted(used))}
    assert [len(found[i].ids) for i in (0, 3, 6, 9)] != [2, 4, 8, 10]  # it differs from doubling the clients


# Other policies --------------------------------------------------------------------------------------------------


def test_the_first_exchange_is_sent_to_all_who_are_invited():
    federation = blobs((5, 4, 3, 6))
    plain = serve(make("feddar-wa"), federation, rate=0.5)
    wrapped = serve(make("feddar-wa"), federation, participation=staged(first=2), clock=FIXED)
    down = [_records(server, 1)[0].bytes_down for server in (plain, wrapped)]
    assert down[1] == down[0] * 3 // 2  # four invited, two used, and two exchanges


def test_flanp_keeps_the_clients_of_a_stage_and_adds_the_fastest_others():
    policy = {"policy": "flanp", "flanp": {"first": 2, "rule": "fixed", "stage_rounds": 3}}
    found = play(policy, {"speeds": "dynamic"})
    assert [len(choice.ids) for choice in found] == [2] * 3 + [4] * 3 + [8] * 3 + [10] * 3
    for number, choice in enumerate(found):
        if number % 3:  # only the clients of the stage are asked
            assert choice.ids == found[number - 1].ids == sorted(choice.replied)
        elif number:
            before, others = found[number - 1].ids, sorted(set(IDS) - set(found[number - 1].ids))
            fastest = sorted(others, key=choice.replied.__getitem__)[: len(choice.ids) - len(before)]
            assert choice.ids == sorted([*before, *fastest])
        assert choice.seconds == max(choice.replied[client] for client in choice.ids)


def test_flanp_draws_its_candidates_once_and_stays_with_them():
    policy = {"policy": "flanp", "rate": 0.5, "flanp": {"first": 2, "rule": "fixed", "stage_rounds": 1}}
    found = play(policy, {"speeds": "dynamic"}, rounds=20)
    assert len(found[-1].ids) == len({client for choice in found for client in choice.replied}) == 5


def test_a_deadline_uses_all_replies_within_it_and_lasts_until_it_unless_all_are_there():
    clock = {"speeds": "dynamic", "communication": 0.2}
    policy = {"policy": "deadline", "rate": 0.5, "deadline": {"seconds": 2.0}}
    found = play(policy, clock, rounds=40)
    for choice in found:
        in_time = [client for client, seconds in choice.replied.items() if seconds <= 2.0]
        assert choice.ids == sorted(in_time)
        everyone = len(in_time) == len(choice.replied)
        assert choice.seconds == (max(choice.replied.values()) if everyone else 2.0)
    assert {len(choice.ids) for choice in found} > {1, 2, 3}


def test_over_selection_invites_more_clients_than_it_uses():
    policy = {"policy": "overselection", "rate": 0.4, "overselection": {"factor": 1.5}, "last_round": "sampled"}
    for choice in play(policy, {"speeds": "dynamic"}):
        assert len(choice.replied) == 6
        assert choice.ids == sorted(sorted(choice.replied, key=choice.replied.__getitem__)[:4])
    everyone = play({**policy, "overselection": {"factor": 1e308}}, rounds=1)
    assert len(everyone[0].replied) == 10 and len(everyone[0].ids) == 4


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            srpfl(first=11),
            r"participation\.srpfl\.first is 11, but only 10 clients are invited to a round \(participation\.rate\)",
        ),
        ({**srpfl(first=6), "rate": 0.5}, r"participation\.srpfl\.first is 6, but only 5 clients"),
        (srpfl(stage_rounds=None), r"rule = 'fixed' needs participation\.srpfl\.stage_rounds"),
        (srpfl(stage_rounds=[3, 0]), r"participation\.srpfl\.stage_rounds must be at least 1 \(given: \[3, 0\]\)"),
        (srpfl(rule="theory", stage_rounds=None), r"rule = 'theory' needs participation\.srpfl\.contraction"),
        (srpfl(contraction=0.1), r"rule = 'theory' needs participation\.srpfl\.contraction, others none"),
        ({"policy": "flanp", "flanp": {"mu": 1.0}}, r"rule = 'gradient' needs participation\.flanp\.mu, others none"),
        ({"policy": "flanp", "flanp": {"first": 11}}, r"participation\.flanp\.first is 11, but only 10"),
        ({"policy": "flanp", "flanp": {"rule": "gradient"}}, r"rule = 'gradient' needs participation\.flanp\.mu"),
        ({"policy": "deadline"}, r"'deadline' needs participation\.deadline\.seconds"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(policy, message):
    with pytest.raises(PerfedError, match=message) as error:
        selection(policy)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate": 0.0},
        {"rate": 1.5},
        {"last_round": "none"},
        {"ratio": 1.0},
        {"policy": "fastest"},
        {"srpfl": {"first": 0}},
        {"deadline": {"seconds": -1.0}},
        {"overselection": {"factor": 0.5}},
    ],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValidationError):
        Participation(**wrong)


# With a method ---------------------------------------------------------------------------------------------------

FIXED = Clock(speeds="fixed")


def staged(first=1, stage_rounds=2, **more) -> Participation:
    return Participation(**{**srpfl(first=first, stage_rounds=stage_rounds), **more})


@pytest.mark.parametrize("name", ["fedrep", "fedpac", "feddar-sa"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_that_was_not_used_keeps_its_state_bit_for_bit(name, engine):
    federation = blobs((5, 4, 3, 6))
    server = train(serve(make(name), federation, participation=staged(), clock=FIXED, **ENGINES[engine]), 2)
    before = {path: tensor.clone() for path, tensor in every_tensor(server).items()}
    used = server.round(3).participants
    after = every_tensor(server)
    assert len(used) == 2
    unused = [path for path in before if path[0] not in (*used, "server")]
    assert all(torch.equal(after[path], before[path]) for path in unused)
    assert any(not torch.equal(after[path], before[path]) for path in before if path[0] == "server")


def test_clients_whose_replies_are_not_used_are_not_computed_and_every_exchange_goes_to_the_same():
    asked: list[list[str]] = []
    server = serve(make("feddar-sa"), blobs((5, 4, 3, 6)), participation=staged(first=2), clock=FIXED)
    run = server.engine.run
    server.engine.run = lambda task, steps: asked.append(list(task.ids)) or run(task, steps)
    server.prepare()
    asked.clear()
    record = server.round(1)
    assert asked == [record.participants] * 2 and len(record.participants) == 2


@pytest.mark.parametrize("name", ["fedrep", "feddar-wa"])
def test_srpfl_with_all_clients_in_the_first_stage_is_the_plain_method(name):
    plain = train(serve(make(name), blobs((5, 4, 3, 6))), 3)
    wrapped = train(serve(make(name), blobs((5, 4, 3, 6)), participation=staged(first=4), clock=FIXED), 3)
    assert difference(wrapped, plain) == 0
    other = train(serve(make(name), blobs((5, 4, 3, 6)), participation=staged(first=3), clock=FIXED), 3)
    assert difference(other, plain) > 1e-6


@pytest.mark.long
@pytest.mark.parametrize("speeds", ["fixed", "dynamic"])
def test_participants_and_times_are_the_same_on_any_engine(speeds):
    clock = Clock(speeds=speeds, communication=1.0)
    found = []
    for options in (*ENGINES.values(), {"engine": "stacked", "chunk": 1}):
        server = serve(make("fedrep"), blobs((5, 4, 3, 6)), participation=staged(), clock=clock, **options)
        records = [server.round(number) for number in range(1, 6)]
        found.append([(record.participants, record.seconds) for record in records])
    assert all(other == found[0] for other in found) and len(found[0][0][0]) == 1


def scripted(tmp_path, communication: float) -> Clock:
    file = tmp_path / "trace.csv"
    lines = ["c0,*,3", "c1,1,9", "c1,*,1", "c2,*,2", "c3,*,5"]
    file.write_text("\n".join(["client,round,seconds", *lines]) + "\n")
    return Clock(speeds="trace", communication=communication, trace={"file": str(file)})


@pytest.mark.long
def test_the_time_of_a_scripted_run_equals_the_hand_computation(tmp_path):
    federation = blobs((5, 4, 3, 6))
    options = {"participation": staged(first=1, stage_rounds=1), "clock": scripted(tmp_path, 10.0)}
    one = _records(serve(make("fedrep"), federation, **options), 4)
    # Round 1: c2 (2 s) is first; round 2: c1 and c2; rounds 3 and 4: everyone, c3 (5 s) is last.
    assert [(r.participants, r.seconds) for r in one] == [
        (["c2"], 12.0),
        (["c1", "c2"], 12.0),
        (["c0", "c1", "c2", "c3"], 15.0),
        (["c0", "c1", "c2", "c3"], 15.0),
    ]
    two = _records(serve(make("feddar-wa"), federation, **options), 1)  # two exchanges: twice the communication
    assert two[0].seconds == 22.0
    slow = _records(serve(make("fedavg"), federation, clock=scripted(tmp_path, 0.0)), 2)
    assert [record.seconds for record in slow] == [9.0, 5.0]
    # Alignment of everybody after each round: one more exchange, and the slowest client is waited for.
    flic = _records(
        serve(make("hetfedrep", more_extensions=(quick(Anchors, realign_epochs=1),)), federation, **options), 2
    )
    assert [record.seconds for record in flic] == [12.0 + 19.0, 12.0 + 15.0]


def test_the_gradient_that_flanp_asks_for_is_an_exchange_of_its_own(tmp_path):
    federation = blobs((5, 4, 3, 6))
    rules = [{"rule": "fixed", "stage_rounds": 9}, {"rule": "gradient", "mu": 1e9}]
    policies = [Participation(policy="flanp", flanp={"first": 2, **rule}) for rule in rules]
    options = {"clock": scripted(tmp_path, 10.0)}
    plain, asked = (_records(serve(make("fedavg"), federation, participation=p, **options), 1)[0] for p in policies)
    assert plain.participants == asked.participants
    assert asked.seconds == plain.seconds + 10 and asked.exchanges == plain.exchanges + 1
    # The new model goes out and a gradient comes back, to and from the two used: as much as the model itself.
    assert asked.bytes_up > plain.bytes_up * 3 / 2 and asked.bytes_down == plain.bytes_down * 3 // 2


def test_a_run_lets_clients_that_were_never_used_fit_their_heads():
    """Also in the evaluations on the way, on a copy; ``fit_unused = false`` leaves them as they are."""
    federation, accuracy, heads = blobs((5, 4, 3, 6)), {}, {}
    for fits in (None, False):
        policy = Participation(**srpfl(first=1, stage_rounds=9), fit_unused=fits)
        run = Run(
            federation,
            make("fedrep"),
            network(),
            rounds=3,
            participation=policy,
            clock=FIXED,
            evaluation=Evaluation(every=1),
        )
        run.execute()
        assert len({client for line in run.history for client in line["participants"]}) == 1
        accuracy[fits] = [line["metrics"]["loss"]["mean"] for line in run.history]
        heads[fits] = {client: run.model(client)[1]["head.weight"] for client in federation.ids}
    assert all(fitted < left for fitted, left in zip(accuracy[None], accuracy[False], strict=True))
    (used,) = run.history[0]["participants"]
    for client in federation.ids:
        assert torch.equal(heads[None][client], heads[False][client]) == (client == used)


@pytest.mark.long
@pytest.mark.parametrize("name", ["ditto", "apfl", "fedrod", "l2gd", "pfedme", "lg-fedavg", "fedproto-g", "flic-hl"])
def test_clients_that_were_never_used_fit_own_models_wherever_the_method_keeps_them(name):
    slow = {"ditto": {"lam": 0.1}, "pfedme": {"lam": 2.0, "eta": 0.5}}.get(name, {})
    method = make(name, lr=0.02, local_epochs=20, **slow)
    server = serve(method, blobs((5, 4, 3, 6)), model=network_for(method), participation=staged(), clock=FIXED)
    train(server, 1)
    (used,) = server.round(2).participants
    never = [client for client in ("c0", "c1", "c2", "c3") if client != used]
    before = server.evaluate("train")
    fitted = server.evaluate("train", never_used=never)
    assert fitted[used] == pytest.approx(before[used], rel=1e-10)  # in a cohort of its own
    server.settle(never, 2)
    settled = server.evaluate("train")
    for client in never:
        assert fitted[client]["loss"] < 0.8 * before[client]["loss"]
        assert settled[client]["loss"] < 0.8 * before[client]["loss"]


def _records(server: Server, rounds: int) -> list:
    server.prepare()
    return [server.round(number) for number in range(1, rounds + 1)]


def test_a_round_without_a_reply_in_time_changes_nothing_but_the_clock(tmp_path):
    deadline = Participation(policy="deadline", deadline={"seconds": 0.5})
    server = serve(make("fedrep"), blobs((5, 4, 3, 6)), participation=deadline, clock=scripted(tmp_path, 0.0))
    server.prepare()
    before = {path: tensor.clone() for path, tensor in every_tensor(server).items()}
    record = server.round(1)
    assert (record.participants, record.seconds) == ([], 0.5) and np.isnan(record.train_loss)
    assert all(torch.equal(every_tensor(server)[path], tensor) for path, tensor in before.items())


def test_clients_that_were_never_used_fit_only_their_personal_parameters_at_the_end():
    server = serve(make("fedrep"), blobs((5, 4, 3, 6)), participation=staged(), clock=FIXED)
    train(server, 1)
    (used,) = server.round(2).participants
    never = [client for client in ("c0", "c1", "c2", "c3") if client != used]
    server.evaluate("train")
    before = {path: tensor.clone() for path, tensor in every_tensor(server).items()}
    loss = server.evaluate("train")
    fitted = server.evaluate("train", never_used=never)
    assert all(torch.equal(every_tensor(server)[path], tensor) for path, tensor in before.items())
    assert fitted[used] == pytest.approx(loss[used], rel=1e-10)  # in a cohort of its own
    assert all(fitted[client]["loss"] < loss[client]["loss"] for client in never)
    server.settle(never, 2)
    after = every_tensor(server)
    moved = {path[0] for path in after if path not in before or not torch.equal(after[path], before[path])}
    assert moved == set(never)
    assert all(server.evaluate("train")[client]["loss"] < loss[client]["loss"] for client in never)
    kept = server.evaluate("train")  # the state of now is the own model
    assert all(kept[client]["loss"] < loss[client]["loss"] for client in never)
    plain = serve(make("fedrep"), blobs((5, 4, 3, 6)), rate=0.25)
    train(plain, 1)
    before = {path: tensor.clone() for path, tensor in every_tensor(plain).items()}
    plain.settle(never, 2)  # only SRPFL does so
    assert all(torch.equal(every_tensor(plain)[path], tensor) for path, tensor in before.items())


def regressions(clients: int = 4) -> Federation:
    generator = torch.Generator().manual_seed(0)
    arrays = {}
    for i in range(clients):
        x = torch.randn(6 + i, 3, generator=generator, dtype=torch.float64)
        y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + torch.randn(6 + i, generator=generator)
        arrays[f"c{i}"] = {"x_train": x, "y_train": y.double()}
    return Federation.from_arrays(arrays, num_classes=None)


def squared_norm(server: Server, ids: list[str]) -> float:
    """|gradient|^2 of the mean of the clients' squared errors, weighted by their samples, in closed form."""
    weight, bias = (server.state.shared[f"head.{name}"] for name in ("weight", "bias"))
    parts = [server.engine.clients[client].train for client in ids]
    x, y = torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts])
    rows = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    error = rows @ torch.cat([weight[0], bias]) - y
    return float((2 * rows.T @ error / len(x)).square().sum())


@pytest.mark.parametrize("name", ["hypcluster", "fedem", "fedfomo", "fedamp", "pfedhn", "local"])
def test_a_gradient_is_asked_for_only_where_there_is_a_shared_model(name):
    policy = Participation(policy="flanp", flanp={"first": 1, "rule": "gradient", "mu": 1.0})
    with pytest.raises(PerfedError, match=r"rule = 'gradient' measures .* moves none; allowed: fixed, plateau"):
        serve(make(name), blobs((5, 4, 3)), participation=policy, clock=FIXED)


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_flanp_ends_a_stage_when_the_gradient_is_small_enough(engine):
    mu, accuracy = 1.0, 6.0
    policy = Participation(policy="flanp", flanp={"first": 1, "rule": "gradient", "mu": mu, "accuracy": accuracy})
    method = make("fedavg", optimizer="sgd", lr=0.02, batch_size=100)
    server = serve(
        method,
        regressions(),
        model=Model(head=linear(1)),
        participation=policy,
        clock=FIXED,
        rounds=60,
        **ENGINES[engine],
    )
    server.prepare()
    expected, found = 1, []
    for number in range(1, 61):
        used = server.round(number).participants
        assert len(used) == expected
        found.append(expected)
        samples = sum(len(server.engine.clients[client].train) for client in used)
        if squared_norm(server, used) <= 2 * mu * accuracy / samples:
            expected = min(4, 2 * expected)
    assert set(found) == {1, 2, 4} and found[0] == found[1] == 1


def test_the_gradient_for_policies_is_that_of_the_mean_training_loss():
    federation = blobs((5, 1, 7))
    method = make("fedavg")
    group = cohort(method, federation)
    server = serve(method, federation)
    shared = {name: t.expand(3, *t.shape).clone() for name, t in server.state.shared.items()}
    reply = gradient(method, group, shared)
    assert bool(group.train_loss.isnan().all())  # it is no training
    for row, client in enumerate(federation):
        chain = network().build((4,)).double()
        chain.load_state_dict({name: t[row] for name, t in shared.items()})
        loss = torch.nn.functional.cross_entropy(chain(client.train.x.double()), client.train.y)
        own = dict(
            zip(dict(chain.named_parameters()), torch.autograd.grad(loss, list(chain.parameters())), strict=True)
        )
        for name, value in own.items():
            torch.testing.assert_close(reply["gradient"][name][row], value)


@pytest.mark.long
@pytest.mark.parametrize("order", ["shuffled", "fixed"])
def test_the_cyclic_policy_hands_the_model_from_client_to_client(order):
    federation, policy = blobs((6, 5, 4)), Participation(policy="cyclic", cyclic={"order": order})
    server = serve(make("fedavg"), federation, participation=policy, rounds=12)
    server.prepare()
    visits = []
    for number in range(1, 13):
        alone = serve(make("fedavg"), federation)
        alone.state.shared = dict(server.state.shared)
        visits += server.round(number).participants
        trained = cohort(make("fedavg"), federation, ids=visits[-1:], round_=number)
        reply = make("fedavg").train(trained, {n: t[None] for n, t in alone.state.shared.items()})
        assert all(torch.equal(server.state.shared[n], t[0]) for n, t in reply["shared"].items())
    cycles = [tuple(visits[at : at + 3]) for at in range(0, 12, 3)]
    assert all(sorted(cycle) == ["c0", "c1", "c2"] for cycle in cycles)
    assert (len(set(cycles)) == 1) == (order == "fixed")


def test_without_an_invited_client_no_reply_is_used_and_no_time_passes():
    nothing = Arrivals(np.zeros(0, int), np.zeros(0), np.zeros(0, int))
    for rows, seconds in (take_first(nothing), take_first(nothing, 2), take_without(nothing, np.array([0]))):
        assert len(rows) == 0 and seconds == 0.0
