"""Two methods that a user might write, with more than one model per client: they need nothing but the public parts."""

from __future__ import annotations

import pytest
import torch
from engines import ENGINES, blobs, difference, mean_accuracy, opposite_labels, quick, serve, train

from perfed.maths.aggregate import weighted_mean
from perfed.method.declared import ParameterSet
from perfed.method.exchange import Reply
from perfed.method.method import Method
from perfed.methods.fedavg import FedAvg
from perfed.model.chain import STAGES, Model
from perfed.model.presets import linear, mlp


class Ditto(Method):
    """FedAvg; every client also trains a model of its own that is pulled to the received one (Li et al. 2021)."""

    pull: float = 1.0

    def sets(self):
        return {"local": ParameterSet("client", like="model")}

    def round(self, server, clients):
        reply = clients.run(self.train, shared=server.shared)
        server.shared = weighted_mean(reply.shared, reply.num_samples)

    def train(self, cohort, shared):
        cohort.load(shared)
        cohort.fit(STAGES, epochs=self.local_epochs)
        near = {name: tensor.clone() for name, tensor in cohort.received.items()}

        def penalty(step):
            gaps = [(step.params[n] - step.select_rows(t)).flatten(1).square().sum(1) for n, t in near.items()]
            return self.pull / 2 * torch.stack(gaps).sum(0)

        cohort.penalties = [penalty]
        cohort.fit(STAGES, epochs=self.local_epochs, params=cohort.state["local"])
        return Reply(shared=cohort.shared(), num_samples=cohort.num_samples)

    def personalise(self, cohort, **payload):
        cohort.load(payload["shared"], cohort.state["local"])


class Clusters(Method):
    """k models at the server; each client trains the one that suits its data best (IFCA, Ghosh et al. 2020)."""

    def sets(self):
        return {"bank": ParameterSet("server", like="model", bank=2)}

    def round(self, server, clients):
        reply = clients.run(self.train, bank=server.bank)
        chosen = torch.nn.functional.one_hot(reply.choice, 2).to(reply.num_samples) * reply.num_samples[:, None]
        entries = []
        for j in range(2):
            kept = {name: tensor[j] for name, tensor in server.bank.items()}
            entries.append(weighted_mean(reply.model, chosen[:, j]) if chosen[:, j].any() else kept)
        server.bank = {name: torch.stack([entry[name] for entry in entries]) for name in entries[0]}

    def choose(self, cohort, bank):
        choice = cohort.losses(bank).argmin(1)
        rows = torch.arange(cohort.n)
        return choice, {name: tensor[rows, choice] for name, tensor in bank.items()}

    def train(self, cohort, bank):
        choice, model = self.choose(cohort, bank)
        cohort.fit(STAGES, epochs=self.local_epochs, params=model)
        return Reply(model=model, choice=choice, num_samples=cohort.num_samples)

    def download(self, server):
        return {"bank": server.bank}

    def personalise(self, cohort, **payload):
        cohort.load(self.choose(cohort, payload["bank"])[1])


@pytest.mark.long
@pytest.mark.parametrize("kind", [Ditto, Clusters])
def test_both_give_the_same_results_in_every_engine(kind):
    runs = {
        name: train(serve(quick(kind), blobs((9, 6, 4, 1, 3)), rate=0.7, **options), 3)
        for name, options in {**ENGINES, "chunks": {"engine": "stacked", "chunk": 3}}.items()
    }
    for run in runs.values():
        assert difference(run, runs["sequential"]) <= 1e-8
    scores = [run.evaluate("test") for run in runs.values()]
    for found in scores[1:]:
        for client, values in found.items():
            assert values == pytest.approx(scores[0][client], rel=1e-8)


def distance(server, client):
    local, shared = server.engine.states[client]["local"], server.state.shared
    return sum(float((local[name] - tensor).square().sum()) for name, tensor in shared.items()) ** 0.5


@pytest.mark.long
def test_ditto_without_pull_is_local_training_and_with_much_pull_stays_near_the_global_model():
    gaps = []
    for pull in (0.0, 20.0):
        server = train(serve(quick(Ditto, pull=pull, optimizer="sgd", lr=0.02), blobs((12, 8))), 6)
        assert set(server.engine.states["c0"]) == {"model", "local"} and not server.engine.states["c0"]["model"]
        gaps.append(sum(distance(server, client) for client in server.engine.states))
    assert gaps[1] < 0.5 * gaps[0]


def test_dittos_local_models_are_trained_on_their_own_loss():
    """Without pull, the global part of the program changes nothing for the local model."""
    free = train(serve(quick(Ditto, pull=0.0), blobs((9, 5))), 2)
    alone = train(serve(quick(Ditto, pull=0.0), blobs((9, 5)), engine="sequential"), 2)
    for client in ("c0", "c1"):
        for name, tensor in free.engine.states[client]["local"].items():
            torch.testing.assert_close(alone.engine.states[client]["local"][name], tensor, rtol=1e-9, atol=1e-9)
    first, second = (free.engine.states[c]["local"]["head.weight"] for c in ("c0", "c1"))
    assert not torch.equal(first, second)


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_the_bank_separates_two_groups_of_clients_with_opposite_labels(engine):
    model = Model(body=mlp((8,), 4), head=linear(2))
    settings = {"local_epochs": 3, "lr": 0.03}
    server = train(serve(quick(Clusters, **settings), opposite_labels(), model=model, seed=1, **ENGINES[engine]), 8)
    payload = {"bank": server.state.bank}
    choices = {}
    for group in server.engine.cohorts(server.engine.federation.ids, payload):
        bank = {n: t.unsqueeze(0).expand(group.n, *t.shape) for n, t in server.state.bank.items()}
        choice, _ = server.initialiser.method.choose(group, bank)
        choices |= dict(zip(group.ids, choice.tolist(), strict=True))
    assert {choices[f"c{i}"] for i in (0, 2, 4)} != {choices[f"c{i}"] for i in (1, 3, 5)}
    assert len(set(choices.values())) == 2 and choices["c0"] == choices["c2"] == choices["c4"]
    assert mean_accuracy(server) > 0.9


def test_a_single_model_cannot_do_that():
    model = Model(body=mlp((8,), 4), head=linear(2))
    server = train(serve(quick(FedAvg, local_epochs=3, lr=0.03), opposite_labels(), model=model, seed=1), 8)
    assert mean_accuracy(server) < 0.7


def test_entries_of_a_bank_start_differently_and_losses_have_a_bank_axis():
    server = serve(quick(Clusters), blobs((5, 4)))
    bank = server.state.bank
    assert not torch.equal(bank["head.weight"][0], bank["head.weight"][1])
    (group,) = server.engine.cohorts(["c0", "c1"], {"bank": bank})
    shown = {n: t.unsqueeze(0).expand(2, *t.shape) for n, t in bank.items()}
    losses = group.losses(shown)
    assert losses.shape == (2, 2)
    for client in range(2):
        for entry in range(2):
            chain = server.initialiser.chain((4,))
            values = {n: t[entry] for n, t in bank.items()}
            data = group.clients[client].train
            logits = torch.func.functional_call(chain, values, (data.x,))
            expected = torch.nn.functional.cross_entropy(logits, data.y)
            torch.testing.assert_close(losses[client, entry], expected)
