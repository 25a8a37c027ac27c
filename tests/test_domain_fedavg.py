"""FedAvg for known domains: re-weighting, a head per domain, a model per domain."""

from __future__ import annotations

from dataclasses import replace

import torch
from engines import blobs, difference, make, serve, train

from perfed.aggregate import masked_mean
from perfed.datasets import load


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


def test_heads_are_averaged_by_the_samples_of_their_domain():
    old, stacked = torch.zeros(3, 2), torch.arange(12.0).view(2, 3, 2)
    counts = torch.tensor([[1.0, 0.0, 4.0], [3.0, 0.0, 0.0]])
    found = masked_mean(stacked, counts, old)
    torch.testing.assert_close(found[0], (stacked[0, 0] + 3 * stacked[1, 0]) / 4)
    torch.testing.assert_close(found[2], stacked[0, 2])
    assert torch.equal(found[1], old[1])


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
