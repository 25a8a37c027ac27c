"""FedAvg for known domains: re-weighting, a head per domain, a model per domain."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from engines import assert_same_metrics, blobs, cohort, difference, make, network, serve, train
from planes import LINEAR, flat, planes, quadratic
from pydantic import ValidationError

from perfed.data.federation import Federation
from perfed.datasets import load
from perfed.errors import PerfedError
from perfed.maths.aggregate import masked_mean
from perfed.method.domains import mean_loss_per_domain
from perfed.method.registry import method_names
from perfed.model.chain import STAGES
from perfed.training.step import Step


def test_re_weighting_changes_nothing_where_domains_are_equally_frequent_and_something_elsewhere():
    for every, equal in ((2, True), (4, False)):  # every second, or every fourth sample is of domain 0
        domain = (torch.arange(8) % every > 0).long()
        clients = tuple(
            replace(c, train=replace(c.train, domain=domain), test=replace(c.test, domain=domain[:6]))
            for c in blobs((8, 8))
        )
        federation = replace(blobs((8, 8)), clients=clients)
        runs = [train(serve(make("fedavg-rw", reweight=flag), federation), 2) for flag in (True, False)]
        shared = runs[1].state.shared
        gap = max(float((runs[0].state.shared[name] - t).norm() / t.norm()) for name, t in shared.items())
        assert (gap < 1e-9) == equal


def test_without_re_weighting_and_with_everything_shared_it_is_fedavg():
    plain = train(serve(make("fedavg"), blobs()), 2)
    rw = train(serve(make("fedavg-rw", reweight=False), blobs()), 2)
    for name, tensor in plain.state.shared.items():
        torch.testing.assert_close(rw.state.shared[name], tensor)


def test_the_model_of_a_domain_is_fedavg_on_its_samples_alone():
    """Samples of the other domain change nothing for it, with full batches."""
    federation = blobs((9, 8, 7))

    def flipped(split):
        other = split.domain == 1
        return replace(split, x=torch.where(other[:, None], -3 * split.x, split.x))

    other = replace(federation, clients=tuple(replace(c, train=flipped(c.train)) for c in federation))
    settings = {"optimizer": "sgd", "lr": 0.05, "batch_size": 100}
    runs = [train(serve(make("separate-fedavg", **settings), data), 2) for data in (federation, other)]
    for name, tensor in runs[0].state.shared.items():
        torch.testing.assert_close(runs[1].state.shared[name][0], tensor[0])
    assert difference(*runs) > 1e-3
    # and it is FedAvg on these samples, weighted by their numbers
    alone = replace(federation, clients=tuple(replace(c, train=only(c.train, 0)) for c in federation))
    plain = train(serve(make("fedavg", **settings), alone), 2)
    for name, tensor in plain.state.shared.items():
        torch.testing.assert_close(runs[0].state.shared[name][0], tensor)


@pytest.mark.parametrize("regression", [False, True])
def test_the_loss_of_a_mini_batch_is_the_sum_of_its_domains_means_to_the_last_digits(regression):
    federation, model = blobs((11, 7, 5), regression=regression), network(1 if regression else 3)
    method = make("separate-fedavg", batch_size=7)
    shared = serve(method, federation, model=model).state.shared
    group = cohort(method, federation, model=model)
    group.load({name: t.expand(3, *t.shape) for name, t in shared.items()})
    found = []

    def mean(own, x, y) -> float:
        out = torch.func.functional_call(group.chain, own, (x,))
        return float(F.mse_loss(out.squeeze(1), y) if regression else F.cross_entropy(out, y))

    def loss(step: Step) -> torch.Tensor:
        value = mean_loss_per_domain(2)(step)
        with torch.no_grad():
            for row, batch in enumerate(zip(step.x, step.y, step.domain, step.weight, strict=True)):
                x, y, domain = (t[batch[3] > 0] for t in batch[:3])
                held = domain.unique().tolist()
                own = [{name: t[row, m] for name, t in step.params.items()} for m in held]
                means = [mean(p, x[domain == m], y[domain == m]) for p, m in zip(own, held, strict=True)]
                found.append((float(value[row]), sum(means)))
        return value

    group.fit(STAGES, epochs=2, loss=loss)
    assert len(found) == 2 * (2 + 1 + 1)
    for value, expected in found:
        assert value == pytest.approx(expected, rel=1e-14, abs=0)


def only(split, domain):
    return split.take(torch.nonzero(split.domain == domain).flatten())


def test_heads_are_averaged_by_the_samples_of_their_domain():
    old, stacked = torch.zeros(3, 2), torch.arange(12.0).view(2, 3, 2)
    counts = torch.tensor([[1.0, 0.0, 4.0], [3.0, 0.0, 0.0]])
    found = masked_mean(stacked, counts, old)
    torch.testing.assert_close(found[0], (stacked[0, 0] + 3 * stacked[1, 0]) / 4)
    torch.testing.assert_close(found[2], stacked[0, 2])
    assert torch.equal(found[1], old[1])


def test_separate_fine_tuning_is_fedavg_and_then_fedavg_on_each_domain():
    """By hand, on quadratics in full batches: two rounds for all domains, then two rounds for each."""
    federation = planes((12, 8), first=0.5, more=0.5)
    clients = [replace(c, train=replace(c.train, domain=torch.arange(len(c.train)) % 3 % 2)) for c in federation]
    federation = replace(federation, clients=tuple(replace(c, test=c.train) for c in clients))
    settings = {"optimizer": "sgd", "lr": 0.1, "batch_size": 100, "local_epochs": 3, "lr_drops": (2,), "lr_factor": 0.5}
    server = serve(make("fedavg-separate-ft", **settings, warmup_rounds=2), federation, model=LINEAR)
    head = {name: t[:1] for name, t in server.state.shared.items()}
    train(server, 4)

    def averaged(w, parts, lr, epochs):
        local = []
        for part in parts:
            (a, b), own = quadratic(part), w
            for _ in range(epochs):
                own = own - lr * (a @ own - b)
            local.append(len(part.train) * own)
        return sum(local) / sum(len(part.train) for part in parts)

    w = flat(head)
    for _ in range(2):
        w = averaged(w, federation.clients, 0.1, 3)
    for domain in range(2):
        own, parts = w, [replace(c, train=only(c.train, domain)) for c in federation]
        for _ in range(2):
            own = averaged(own, parts, 0.05, 3)
        found = flat({name: t[domain] for name, t in server.state.shared.items()})
        torch.testing.assert_close(found, own, rtol=1e-11, atol=1e-12)


# Fine-tuning on each domain ----------------------------------------------------------------------------------


def some_domains() -> Federation:
    """c0 has training samples of both domains, c1 of domain 0 only; both are tested on both."""
    clients = []
    for row, client in enumerate(blobs((11, 6))):
        domain = torch.arange(len(client.train)) % 3 // (2 - row) % 2 * (1 - row)
        test = replace(client.test, domain=torch.arange(len(client.test)) % 2)
        clients.append(replace(client, train=replace(client.train, domain=domain), test=test))
    return replace(blobs((11, 6)), clients=tuple(clients))


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("engine", ["stacked", "sequential"])
def test_each_copy_is_what_a_fit_on_the_domain_alone_gives(engine):
    federation, method = some_domains(), make("fedavg-domain-ft")
    received = {name: t[None].clone() for name, t in serve(method, federation).state.shared.items()}
    group = cohort(method, federation, engine=engine)
    method.personalise(group, shared={name: t.expand(2, *t.shape[1:]) for name, t in received.items()})
    outputs = {}
    for x, index, valid in group.iterate_windows(group.samples("test")):
        outputs = {int(i): row for i, row in zip(index[valid], method.predict(group, x)[valid], strict=True)}
    for row, client in enumerate(federation):
        for domain in range(2):
            alone = cohort(method, federation, ids=[client.id])
            alone.load(received)
            mine = torch.nonzero(client.train.domain == domain).flatten()
            if len(mine):
                alone.clients = [replace(client, train=client.train.take(mine))]
                for _ in range(domain):
                    alone.fit(STAGES, steps=0)  # the fits of the domains before, which have keys of their own
                alone.fit(STAGES, epochs=method.finetune_epochs)
            else:
                assert (row, domain) == (1, 1)  # the global model
            chosen = torch.nonzero(client.test.domain == domain).flatten()
            expected = alone.forward(client.test.x[chosen][None])[0]
            start = 0 if row == 0 else len(federation.clients[0].test)
            found = torch.stack([outputs[start + int(i)] for i in chosen])
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_fine_tuning_on_domains_trains_as_fedavg_and_without_epochs_evaluates_as_fedavg():
    plain = train(serve(make("fedavg"), blobs()), 2)
    tuned = train(serve(make("fedavg-domain-ft"), blobs()), 2)
    assert difference(plain, tuned) == 0
    assert tuned.evaluate("test") != plain.evaluate("test")
    still = train(serve(make("fedavg-domain-ft", finetune_epochs=0), blobs()), 2)
    assert_same_metrics(still.evaluate("test"), plain.evaluate("test"))


def test_with_one_domain_it_is_fine_tuning():
    def one(split):
        return replace(split, domain=torch.zeros_like(split.domain))

    federation = replace(
        blobs(), clients=tuple(replace(c, train=one(c.train), test=one(c.test)) for c in blobs((12, 7, 5)))
    )
    runs = [train(serve(make(name), federation), 2) for name in ("fedavg-domain-ft", "fedavg-ft")]
    assert_same_metrics(runs[0].evaluate("test"), runs[1].evaluate("test"))


@pytest.mark.long
def test_it_serves_domains_with_opposite_labels():
    """No single model can serve both domains of a client; a copy for each can."""
    generator = torch.Generator().manual_seed(0)
    clients = {}
    for i in range(3):
        x, domain = torch.randn(60, 2, generator=generator), torch.arange(60) % 2
        y = ((x[:, 0] > 0) ^ (domain > 0)).long()
        parts = {"train": slice(0, 40), "test": slice(40, 60)}
        clients[f"c{i}"] = {
            f"{k}_{s}": v[at] for s, at in parts.items() for k, v in (("x", x), ("y", y), ("domain", domain))
        }
    federation = Federation.from_arrays(clients, num_classes=2)
    accuracy = {}
    for name in ("fedavg-ft", "fedavg-domain-ft"):
        server = train(serve(make(name, finetune_epochs=20), federation, model=network(2)), 3)
        scores = server.evaluate("test").values()
        accuracy[name] = sum(values["accuracy"] for values in scores) / 3
    assert accuracy["fedavg-domain-ft"] > 0.8 > 0.7 > accuracy["fedavg-ft"]


NEED_DOMAINS = [name for name in method_names() if "domain" in name or name in ("fedavg-rw", "fedavg-multi-head")]


@pytest.mark.parametrize("name", [*NEED_DOMAINS, "separate-fedavg", "fedminmax", "feddar-sa", "feddar-wa"])
def test_without_domains_they_say_so_before_anything_runs(name):
    plain = {c.id: {"x_train": c.train.x, "y_train": c.train.y} for c in blobs()}
    message = r"^this method needs domains; the data do not say .* \(client 'c0': train samples without domain ids\)$"
    with pytest.raises(PerfedError, match=message):
        serve(make(name), Federation.from_arrays(plain))


# Data --------------------------------------------------------------------------------------------------------


def test_linear_domains_follow_their_law():
    options = {"clients": 80, "noise": 0.0, "dim": 6, "samples_low": 30, "samples_high": 40}
    federation = load("linear-domains", options, seed=3)
    laws = []
    for domain in range(5):
        parts = [c.train.take(torch.nonzero(c.train.domain == domain).flatten()) for c in federation]
        x, y = torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts])
        solution = torch.linalg.lstsq(x, y[:, None]).solution
        torch.testing.assert_close(x @ solution, y[:, None])
        laws.append(solution)
    assert torch.linalg.matrix_rank(torch.cat(laws, 1), rtol=1e-9) == 2
    assert federation.num_domains == 5 and federation.num_classes is None


@pytest.mark.parametrize("name", ["fedavg-multi-head", "feddar-wa", "feddar-sa", "separate-fedavg"])
def test_the_warm_up_is_fedavg_with_the_same_parameters_for_all_domains(name):
    method = make(name, warmup_rounds=2, warmup_epochs=1)
    server, plain = (train(serve(m, blobs((9, 8, 7))), 2) for m in (method, make("fedavg", local_epochs=1)))
    for key, tensor in server.state.shared.items():
        expected = plain.state.shared[key]
        torch.testing.assert_close(tensor, expected.expand_as(tensor), rtol=1e-12, atol=1e-12)
    server.round(3)
    weight = server.state.shared["head.weight"]
    assert not torch.allclose(weight[0], weight[1], atol=1e-3)


def test_in_the_warm_up_a_trained_client_is_measured_with_what_it_trained():
    """Its samples are of the second domain, and the warm-up's go through the first one's head."""
    (client,) = blobs((12,))
    second = [replace(s, domain=torch.ones_like(s.domain)) for s in (client.train, client.test)]
    federation = replace(blobs((12,)), clients=(replace(client, train=second[0], test=second[1]),))
    server = serve(make("fedavg-multi-head", warmup_rounds=1, warmup_epochs=3, lr=0.05), federation)
    server.prepare()
    record = server.round(1, measure="train")
    assert record.after["c0"]["loss"] == pytest.approx(server.evaluate("train")["c0"]["loss"])


def test_separate_models_cannot_be_reweighted():
    with pytest.raises(ValidationError, match="no model sees two domains"):
        make("separate-fedavg", reweight=True)
