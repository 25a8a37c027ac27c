"""Privacy and sums under masks together: the same sums, and as much noise in them as was counted."""

from __future__ import annotations

from math import isnan, sqrt

import pytest
import torch
from engines import blobs, make, quick
from in_process_sites import Sites
from scipy import stats

from perfed.engine.secure_aggregation import SecureAggregation
from perfed.errors import PerfedError
from perfed.methods.fedavg import FedAvg
from perfed.privacy.client import ClientPrivacy
from perfed.privacy.sample import SamplePrivacy
from perfed.sites.flower.message import unpack

SENT = ("shared", "num_samples", "mean", "weight")
SECURE = SecureAggregation(threshold=2)
FEDERATION = blobs((12, 7, 5), dims=(4,))
SECRETS = {client.id: bytes([number]) * 32 for number, client in enumerate(FEDERATION, start=1)}


def private(name: str, extension):
    *others, own = make(name, more_extensions=(extension,)).extensions
    fixed = [e.model_copy(update={"pretrain_epochs": 2}) if e.name == "anchors" else e for e in others]
    return make(name).model_copy(update={"extensions": (own, *fixed)})


def shared(sites: Sites) -> torch.Tensor:
    return flat(sites.server.state.shared)


def flat(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for _, tensor in sorted(parameters.items())])


def came(sites: Sites) -> list[dict[str, torch.Tensor]]:
    found = [unpack(reply) for _, reply in sites.transport.came]
    return [tree["reply"]["shared"] for header, tree in found if header.get("program") == "train"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["fedavg", "fedrep", "flic-hl"])
def test_of_noisy_rows_the_sum_under_masks_is_the_plain_one_to_the_quantisation(name, tmp_path):
    """After a round: the next message is another one then, by rounding, and so its noise is other noise."""
    own, found = SamplePrivacy(noise=0.5, entries=SENT), []
    for secure in (None, SECURE):
        sites = Sites(tmp_path / str(secure), private(name, own), FEDERATION, secure=secure, secrets=SECRETS)
        sites.server.prepare()
        assert isnan(sites.server.round(1).train_loss)  # no loss leaves
        found.append(shared(sites))
        sites.close()
    assert 0 < float((found[0] - found[1]).abs().max()) < 2**-22


@pytest.mark.long
def test_shares_of_noise_that_sites_add_are_in_the_sum_and_in_nothing_that_leaves_without_masks(tmp_path):
    """The mean under masks against that of the same replies, seen: sites are asked the same, so noise is the same."""
    own = ClientPrivacy(clip=0.5, noise=2.0, shares=2, entries=SENT)
    method = quick(FedAvg, extensions=(own,), lr=0.1)
    masked = Sites(tmp_path / "masked", method, FEDERATION, secure=SECURE, secrets=SECRETS)
    seen = Sites(tmp_path / "seen", method, FEDERATION, secrets=SECRETS)
    for sites in (masked, seen):
        sites.server.prepare()
    before = shared(masked)
    masked.server.round(1)
    with pytest.raises(PerfedError, match="its change has the norm"):  # the noise is no change that is cut
        seen.server.round(1)
    replies = [flat(reply) for reply in came(seen)]
    assert len(replies) == 3
    assert float((shared(masked) - torch.stack(replies).mean(0)).abs().max()) <= 2**-24
    assert all(float((reply - before).norm()) > 0.5 for reply in replies)


@pytest.mark.long
@pytest.mark.parametrize(("there", "lost"), [(3, ()), (2, (FEDERATION.ids[1],))])
def test_a_sum_has_the_noise_that_is_counted_also_with_the_fewest_sites(there, lost, tmp_path):
    own = ClientPrivacy(clip=0.5, noise=2.0, shares=2, entries=SENT)
    draws = []
    sites = Sites(
        tmp_path, quick(FedAvg, extensions=(own,), lr=0.0, optimizer="sgd"), FEDERATION, secure=SECURE, secrets=SECRETS
    )
    sites.server.prepare()
    sites.transport.silent = set(lost)
    for number in range(1, 7):
        before = shared(sites)
        sites.server.round(number)
        draws.append((shared(sites) - before) * there / (2.0 * 0.5))  # of the sum, in units of z C
    together = torch.cat(draws)
    assert stats.kstest((together / sqrt(there / 2)).numpy(), "norm").pvalue > 1e-3
    assert abs(float(together.std()) / sqrt(there / 2) - 1) < 0.1
    assert torch.corrcoef(torch.stack(draws)).fill_diagonal_(0).abs().max() < 0.6


@pytest.mark.long
@pytest.mark.parametrize(("part", "refusals"), [(1.0, 3), (0.6, 3), (0.4, 0)])
def test_whether_a_site_refuses_a_sum_does_not_depend_on_its_share_of_the_noise(part, refusals, tmp_path):
    """A server sends a number near the largest that fits, so that only replies above it would not fit."""
    own, secure = ClientPrivacy(clip=0.5, noise=2.0, shares=3, entries=SENT), SecureAggregation(threshold=3)
    sites = Sites(tmp_path, quick(FedAvg, extensions=(own,)), FEDERATION, secure=secure, secrets=SECRETS)
    sites.server.prepare()
    shared_parameters = sites.server.state.shared
    next(iter(shared_parameters.values())).view(-1)[0] = part * secure.numbers(3).largest_value
    sites.server.round(1)
    refused = {site for site, reply in sites.transport.came if "a private reply under masks" in str(unpack(reply)[0])}
    answered = {site for site, reply in sites.transport.came if "masked" in unpack(reply)[1]}
    assert len(refused) == refusals and len(answered) == 3 - refusals


@pytest.mark.long
def test_a_site_without_a_secret_does_not_take_part_in_a_private_study(tmp_path):
    with pytest.raises(PerfedError, match="a private study needs a secret and a budget"):
        Sites(tmp_path, quick(FedAvg, extensions=(SamplePrivacy(entries=SENT),)), FEDERATION)
