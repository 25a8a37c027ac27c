"""A round is one transaction: exchanges see each other's pending states, and all or nothing is kept."""

from __future__ import annotations

import pytest
import torch
from engines import ENGINES, blobs, cohort, difference, every_tensor, make, quick, serve, train

from perfed.errors import PerfedError
from perfed.method.declared import ParameterSet
from perfed.method.exchange import Reply, each
from perfed.method.method import Method
from perfed.participation.clock import Clock
from perfed.participation.settings import Participation


class Counting(Method):
    """Two exchanges: the first adds one to a counter at the client, the second reports what it sees."""

    fail: str = ""

    def sets(self):
        zero = lambda info, key: {"value": torch.zeros((), dtype=info.dtype)}  # noqa: E731
        return {
            "counter": ParameterSet("client", init=zero),
            "seen": ParameterSet("server", init=zero),
            "rows": ParameterSet("table", init=zero),
        }

    def round(self, server, clients):
        first = clients.run(self.add, amount=torch.tensor(2.0))
        server.seen = {"value": first.before.sum()}
        if self.fail == "between":
            raise RuntimeError("the server stumbled")
        second = clients.run(self.report, mine=each({i: torch.tensor(float(i[1:])) for i in clients.ids}))
        server.seen = {"value": second.after.sum()}
        server.rows = server.rows | {i: {"value": x} for i, x in zip(second.ids, second.after, strict=True)}
        if self.fail == "late":
            raise RuntimeError("the server stumbled")

    def add(self, cohort, amount):
        before = cohort.state["counter"]["value"]
        cohort.state["counter"] = {"value": before + amount}
        return Reply(before=before)

    def report(self, cohort, mine):
        if self.fail == "client" and "c2" in cohort.ids:
            raise RuntimeError("client c2 went away")
        order = torch.tensor([float(i[1:]) for i in cohort.ids])
        return Reply(after=cohort.state["counter"]["value"], mine=mine, order=order, n=torch.zeros(cohort.n))


IDS = [f"c{i}" for i in range(6)]


def server_of(engine="stacked", rate=1.0, **settings):
    return serve(quick(Counting, **settings), blobs((3, 9, 1, 4, 7, 2)), rate=rate, **ENGINES[engine])


def counters(server):
    return {i: float(s["counter"]["value"]) for i, s in server.engine.states.items()}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_second_exchange_sees_the_pending_state_of_the_first(engine):
    server = server_of(engine)
    server.round(1)
    assert float(server.state.seen["value"]) == 12.0 and counters(server) == dict.fromkeys(IDS, 2.0)
    server.round(2)
    assert float(server.state.seen["value"]) == 24.0 and counters(server) == dict.fromkeys(IDS, 4.0)
    assert {i: float(row["value"]) for i, row in server.state.rows.items()} == dict.fromkeys(IDS, 4.0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fail", ["between", "late", "client"])
def test_a_round_that_fails_leaves_nothing_behind(engine, fail):
    server = server_of(engine)
    server.round(1)
    before = {path: tensor.clone() for path, tensor in every_tensor(server).items()}
    server.engine.changed.clear()
    server.initialiser.method = quick(Counting, fail=fail)
    with pytest.raises(RuntimeError):
        server.round(2)
    after = every_tensor(server)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[path], tensor) for path, tensor in before.items())
    assert not server.engine.changed
    server.initialiser.method = quick(Counting)
    server.round(2)  # and can simply be repeated
    assert counters(server) == dict.fromkeys(IDS, 4.0) and server.engine.changed == set(IDS)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_second_exchange_that_fails_under_srpfl_leaves_nothing_behind(engine, monkeypatch):
    policy = Participation(policy="srpfl", srpfl={"first": 1, "rule": "fixed", "stage_rounds": 1})
    options = {"participation": policy, "clock": Clock(speeds="fixed"), **ENGINES[engine]}
    servers = [train(serve(make("feddar-sa"), blobs((5, 4, 3, 6)), **options), 1) for _ in range(2)]
    before = {path: tensor.clone() for path, tensor in every_tensor(servers[0]).items()}
    asked = []

    def train_body(self, cohort, **sent):
        asked.extend(cohort.ids)
        raise RuntimeError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(type(servers[0].initialiser.method), "train_body", train_body)
        with pytest.raises(RuntimeError, match="lost"):
            servers[0].round(2)
    assert asked and len(asked) < 4
    after = every_tensor(servers[0])
    assert all(torch.equal(after[path], tensor) for path, tensor in before.items())
    assert servers[0].selection.policy.state == servers[1].selection.policy.state
    assert servers[0].round(2).participants == servers[1].round(2).participants
    assert difference(*servers) == 0  # as if nothing had happened


@pytest.mark.parametrize("engine", ENGINES)
def test_states_of_clients_that_did_not_take_part_stay_bit_for_bit(engine):
    server = server_of(engine, rate=0.5)
    expected = dict.fromkeys(IDS, 0.0)
    for number in range(1, 5):
        record = server.round(number)
        assert len(record.participants) == 3
        for client in record.participants:
            expected[client] += 2.0
    found = counters(server)
    assert all(found.get(client, 0.0) == value for client, value in expected.items())
    assert len(set(expected.values())) > 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["hetfedrep", "flic-hl", "local"])
def test_personal_parameters_of_other_clients_stay_bit_for_bit(engine, method):
    server = train(serve(make(method), blobs((5, 4, 3, 6)), rate=0.5, **ENGINES[engine]), 1)
    server.evaluate("test")
    before = {path: tensor.clone() for path, tensor in every_tensor(server).items()}
    participants = server.round(2).participants
    after = every_tensor(server)
    others = [path for path in before if path[0] not in (*participants, "server")]
    assert others and all(torch.equal(after[path], before[path]) for path in others)
    moved = [path for path in before if path[0] in participants]
    assert moved and not any(torch.equal(after[path], before[path]) for path in moved if path[-1].endswith("weight"))


def test_replies_come_in_the_sorted_order_of_ids_whatever_the_chunks():
    for options in (*ENGINES.values(), {"engine": "stacked", "chunk": 1}):
        server = serve(quick(Counting), blobs((3, 9, 1, 4, 7, 2)), **options)
        seen = {}

        class Spy(Counting):
            def round(self, server, clients, seen=seen):
                clients.run(self.add, amount=torch.tensor(1.0))
                rows = each({i: torch.tensor(10.0 * float(i[1:])) for i in reversed(clients.ids)})
                seen["reply"] = clients.run(self.report, mine=rows)

        server.initialiser.method = quick(Spy)
        server.round(1)
        reply = seen["reply"]
        assert reply.ids == IDS
        assert reply.order.tolist() == [0, 1, 2, 3, 4, 5]
        assert reply.mine.tolist() == [0, 10, 20, 30, 40, 50]  # every client got its own row
        with pytest.raises(AttributeError, match=r"the replies hold no 'nothing'; they hold: .*after"):
            _ = reply.nothing


class Rows(Method):
    """Gives every client its own nested row; one leaf has another shape at every client."""

    def round(self, server, clients):
        rows = {
            i: {"w": torch.full((2,), float(i[1:])), "deep": {"b": torch.ones(int(i[1:]) + 1)}} for i in clients.ids
        }
        reply = clients.run(self.echo, table=each(rows), same={"x": torch.arange(3.0)})
        self_check(reply)

    def echo(self, cohort, table, same):
        assert same["x"].shape == (cohort.n, 3)
        return Reply(w=table["w"], total=table["deep"]["b"].sum(1), same=same)


def self_check(reply):
    assert reply.w.tolist() == [[float(i)] * 2 for i in range(6)]
    assert reply.total.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert reply.same["x"].tolist() == [[0.0, 1.0, 2.0]] * 6


@pytest.mark.parametrize("engine", ENGINES)
def test_each_gives_every_client_its_own_row_of_nested_tensors(engine):
    serve(quick(Rows), blobs((3, 9, 1, 4, 7, 2)), **ENGINES[engine]).round(1)


class Vandal(Method):
    """Changes in place whatever it receives, and trains what it received."""

    def round(self, server, clients):
        reply = clients.run(self.smash, shared=server.shared, copy={"x": torch.ones(3)})
        for name, tensor in server.shared.items():
            assert torch.isfinite(tensor).all(), f"{name} was changed at a client"
        assert reply.x.tolist() == [[1.0] * 3] * len(reply.ids)

    def smash(self, cohort, shared, copy):
        x = copy["x"].clone()
        own = dict(shared)
        cohort.fit(cohort.chain.stages, epochs=1, params=own)
        if cohort.n == 1:  # torch itself refuses this for an expanded tensor
            for tensor in shared.values():
                tensor.fill_(float("nan"))
        return Reply(x=x)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sizes", [(4,), (6, 5, 4)])
def test_a_client_cannot_change_what_the_server_has(engine, sizes):
    server = serve(quick(Vandal), blobs(sizes), **ENGINES[engine])
    before = {name: tensor.clone() for name, tensor in server.state.shared.items()}
    server.round(1)
    assert all(torch.equal(server.state.shared[name], tensor) for name, tensor in before.items())


class Undeclared(Method):
    where: str = "server"

    def round(self, server, clients):
        if self.where == "server":
            server.extra = {}
        elif self.where == "read":
            _ = server.extra
        clients.run(self.train)

    def train(self, cohort):
        if self.where == "client":
            cohort.state["extra"] = {"x": torch.zeros(cohort.n)}


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("server", AttributeError, r"'extra' is not a declared parameter set; declare it in sets\(\)"),
        ("read", AttributeError, "the server has no parameter set 'extra'; declared: shared"),
        ("client", PerfedError, "'extra' is not a declared parameter set at home on the client"),
    ],
)
def test_undeclared_sets_are_errors(where, error, message):
    server = serve(quick(Undeclared, where=where), blobs((3,)))
    with pytest.raises(error, match=message):
        server.round(1)


def test_a_method_object_cannot_keep_state_and_refuses_unknown_settings():
    method = quick(Counting)
    with pytest.raises(ValueError, match="frozen"):
        method.fail = "x"
    with pytest.raises(ValueError, match="Extra inputs"):
        Counting(learning_rate=1.0)


def test_only_programs_of_the_method_and_its_terms_can_run():
    class Foreign(Method):
        def round(self, server, clients):
            clients.run(lambda cohort: None)

    with pytest.raises(PerfedError, match="a client program must be a method of the method"):
        serve(quick(Foreign), blobs((3,))).round(1)


def test_random_keys_differ_between_rounds_clients_and_purposes_and_agree_across_groupings():
    method, federation = quick(Counting), blobs((3, 9, 1))
    group = cohort(method, federation)
    keys = group.key("a")
    assert len({*keys.tolist(), *group.key("b").tolist(), *group.key("a", 1).tolist()}) == 9
    assert cohort(method, federation, ids=["c1"]).key("a").tolist() == keys[1:2].tolist()
    assert cohort(method, federation, round_=2).key("a").tolist() != keys.tolist()


class Replying(Method):
    """Replies what it is told to."""

    entry: str = ""

    def round(self, server, clients):
        clients.run(self.answer)

    def answer(self, cohort):
        n = cohort.n
        return {
            "mean": lambda: Reply(fine=torch.zeros(n), head={"bias": torch.zeros(n, 3).mean(0)}),
            "scalar": lambda: Reply(loss=torch.tensor(0.5)),
            "longer": lambda: Reply(loss=torch.zeros(n + 1)),
            "number": lambda: Reply(loss=0.5),
            "list": lambda: Reply(extensions={"own": [torch.zeros(n)]}),
            "tensor": lambda: torch.zeros(n),
        }[self.entry]()


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("mean", r"Replying\.answer: entry 'head/bias' of the reply has shape \(3,\), but .* clients, 5: none for cli"),
        ("scalar", r"entry 'loss' of the reply has shape \(\), but its first axis .* clients, 5: none for client 'c0'"),
        ("longer", r"entry 'loss' of the reply has shape \(6,\), but .* clients, 5: the last client is 'c4'"),
        ("number", r"Replying\.answer: entry 'loss' of the reply is a float; a tensor"),
        ("list", r"Replying\.answer: entry 'extensions/own' of the reply is a list; a tensor"),
        ("tensor", r"Replying\.answer returned a Tensor; a client program returns a Reply, or None"),
    ],
)
def test_a_reply_whose_first_axis_is_not_the_clients_is_one_line(entry, says):
    server = serve(quick(Replying, entry=entry), blobs((5, 5, 5, 5, 5)), engine="stacked")
    with pytest.raises(PerfedError, match=says) as error:
        server.round(1)
    assert "\n" not in str(error.value)


def test_clients_that_were_only_evaluated_have_no_state_to_keep():
    server = server_of(rate=0.5)
    server.prepare()
    used = server.round(1).participants
    assert set(server.evaluate("test")) == set(server.clients) > set(used)
    assert set(server.engine.states) == set(used)


def test_a_cohort_has_at_most_so_many_clients_and_says_the_same(monkeypatch):
    server = server_of()
    server.prepare()
    server.round(1)
    together = server.evaluate("test")
    monkeypatch.setattr("perfed.engine.engine.COHORT_CLIENTS", 2)
    results = []
    perform = server.engine.perform
    server.engine.perform = lambda task: results.extend(perform(task)) or iter(results)
    apart = server.evaluate("test")
    assert sorted(len(result.ids) for result in results) == [2, 2, 2]
    assert {i: m["loss"] for i, m in apart.items()} == pytest.approx({i: m["loss"] for i, m in together.items()})
