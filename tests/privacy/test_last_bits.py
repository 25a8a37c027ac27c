"""What the bits of floating-point numbers would tell of the rows, or hide of a gradient's norm (Mironov 2012)."""

from __future__ import annotations

from dataclasses import replace
from math import floor, log2

import numpy as np
import pytest
import torch
from engines import blobs, quick, serve
from test_rows import MODELS, one_step

from perfed import Model
from perfed.engine.evaluate import Outputs
from perfed.methods.fedavg import FedAvg
from perfed.model import linear
from perfed.privacy.client import ClientPrivacy
from perfed.privacy.metrics import NoisyMetrics
from perfed.rng import Noise
from perfed.testing.runs import RecordingEngine
from perfed.training.private import PrivateTraining

SOURCE = Noise(b"s" * 32, b"m" * 32)


def is_on_grid(values: torch.Tensor, scale: float) -> bool:
    """Whether all values are multiples of the power of two that is 16 bits below the noise."""
    steps = values.double() * 2.0 ** (16 - floor(log2(scale)))
    return bool((steps == steps.round()).all())


@pytest.mark.parametrize("length", [0.0, 1e-3, 0.7], ids=["row absent", "short row", "row"])
def test_sums_and_counts_have_the_same_last_bits_whether_a_row_is_there_or_not(length):
    """From a sum of zero only some numbers of 32 bits could be reached: any other one told that a row is there."""
    private = PrivateTraining(clip=1.0, noise=13.7, rows=0.9, source=SOURCE)
    rows = torch.full((1, 500), length / 500**0.5)
    sums = private.noisy_sums(rows, torch.zeros(1, dtype=torch.int64), 1, torch.arange(1))
    assert is_on_grid(sums, 13.7 * 0.9)
    assert 0.9 < float(sums.std()) / (13.7 * 0.9) < 1.1
    counts = torch.full((1, 50), round(length), dtype=torch.float32)
    assert is_on_grid(private.noisy_counts(counts, 0, ["one"], "classes"), 13.7)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_gradients_have_the_same_last_bits_whatever_the_rows(model):
    *_, step, loss, params = one_step(model, clip=0.4)
    private = PrivateTraining(clip=0.4, noise=2.0, source=SOURCE)
    _, noisy = private.compute_gradients(loss, step, params, 0)
    for client, unit in enumerate(step.weight.amax(1).tolist()):
        assert all(is_on_grid(grad[client], 0.8 * unit) for grad in noisy.values())


def test_metrics_have_the_same_last_bits_whatever_the_rows():
    metrics = NoisyMetrics(("brier",), "sample", 3.0, 4.0, (1,))
    for y in (np.zeros(5, dtype=np.int64), np.array([0, 1, 0, 1, 1])):
        outputs = Outputs(np.array(["one"] * 5), None, y, np.array([[1.0, -1.0]] * 5))
        told = metrics.add_noise(outputs, {"accuracy": 1.0, "brier": 1.0}, SOURCE)
        assert is_on_grid(torch.tensor([*told.values()], dtype=torch.float64), 3.0 / 5)


@pytest.mark.parametrize("lr", [0.0, 0.3], ids=["no change", "change"])
def test_a_clients_share_of_the_noise_has_the_same_last_bits_whatever_the_change(lr):
    """Received parameters are zero, so that a reply is what its sites' noise and change make of them."""
    extension = ClientPrivacy(noise=3.0, clip=0.7, shares=2, entries=("shared", "num_samples"))
    server = server_with(extension, lr)
    server.engine.executor.noise = SOURCE
    server.round(1)
    replies = [tensor for _, done in server.engine.record for tensor in done.content["shared"].values()]
    together = torch.cat([reply.flatten() for reply in replies])
    assert is_on_grid(together, 3.0 * 0.7 / 2**0.5)
    assert 0.6 < float(together.std()) / (3.0 * 0.7 / 2**0.5) < 1.4


@pytest.mark.parametrize("lr", [0.0, 0.3], ids=["no change", "change"])
def test_the_mean_of_a_server_that_adds_the_noise_has_the_same_last_bits_whatever_the_changes(lr):
    server = server_with(ClientPrivacy(noise=3.0, clip=0.7, entries=("shared", "num_samples"), secret=b"s" * 32), lr)
    server.round(1)
    assert all(is_on_grid(tensor, 3.0 * 0.7 / 3) for tensor in server.state.shared.values())


def server_with(extension: ClientPrivacy, lr: float):
    """A server of three clients, whose shared parameters are zero."""
    method = quick(FedAvg, extensions=(extension,), lr=lr, optimizer="sgd")
    server = serve(method, blobs(), runner=RecordingEngine, dtype=torch.float32)
    server.state.shared = {name: torch.zeros_like(tensor) for name, tensor in server.state.shared.items()}
    return server


def test_a_row_whose_inputs_are_huge_adds_no_more_than_the_norm_that_is_allowed():
    """The square of its gradient at the outputs, 1e-46, is zero in 32 bits, and its norm would seem to be zero."""
    *_, step, loss, params = one_step(Model(head=linear(3)), clip=1e-7)
    x, weight = torch.zeros_like(step.block.x).float(), torch.zeros_like(step.block.weight).float()
    x[step.at, :, 0, 0], weight[step.at, :, 0] = 1e18, 1.0
    params = {name: torch.zeros_like(tensor).float() for name, tensor in params.items()}
    for client, label in enumerate(step.y[:, 0].tolist()):
        params["head.weight"][client, label, 0] = 53e-18  # all other classes have the probability 1e-23
    low = replace(step, block=replace(step.block, x=x, weight=weight), params={**step.params, **params}, _outputs={})
    _, sums = PrivateTraining(clip=1e-7, noise=0.0).compute_gradients(loss, low, params, 0)
    norms = sum(grad.flatten(1).double().square().sum(1) for grad in sums.values()) ** 0.5
    assert (norms <= 1e-7 * 1.001).all()
