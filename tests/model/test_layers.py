from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from perfed import rng
from perfed.errors import PerfedError
from perfed.model.presets import logit
from perfed.model.stacked import Pass, apply_module, is_thread_safe, why_not_stackable

CLIENTS, BATCH = 3, 4


class Residual(nn.Module):
    """A user's own module: not one of the layers that perfed knows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return x + self.gain * torch.tanh(self.inner(x))


class Noisy(nn.Module):
    """A user's own module that draws random numbers."""

    def forward(self, x):
        return F.dropout(x, 0.5, self.training)


class Branching(nn.Module):
    """A user's own module whose computation depends on the values."""

    def forward(self, x):
        return x if x.sum() > 0 else -x


MODULES = {
    "linear": (nn.Linear(6, 5), (6,)),
    "linear without bias": (nn.Linear(6, 5, bias=False), (6,)),
    "linear on sequences": (nn.Linear(6, 5), (2, 6)),
    "mlp": (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Sequential(nn.Linear(5, 4), nn.Tanh())), (6,)),
    "conv": (nn.Conv2d(2, 3, 3), (2, 6, 7)),
    "conv options": (nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2, bias=False), (4, 8, 8)),
    "conv reflect": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 5, 5)),
    "max-pool": (nn.MaxPool2d(2), (2, 6, 7)),
    "max-pool 1d": (nn.MaxPool1d(2), (3, 6)),
    "average pool": (nn.AdaptiveAvgPool2d(2), (2, 6, 7)),
    "flatten": (nn.Flatten(), (2, 3, 4)),
    "flatten from 2": (nn.Flatten(2), (2, 3, 4)),
    "layer-norm": (nn.LayerNorm(6), (6,)),
    "group-norm": (nn.GroupNorm(2, 4), (4, 3, 3)),
    "residual": (Residual(), (6,)),
    "cnn": (nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2)), (1, 6, 6)),
    **{
        type(layer).__name__: (layer, (6,))
        for layer in (nn.ReLU(), nn.LeakyReLU(0.3), nn.Sigmoid(), nn.GELU(), nn.ELU(), nn.SiLU(), nn.Softplus())
    },
}


def per_client(module: nn.Module) -> list[nn.Module]:
    """Copies of ``module`` with different random values."""
    copies = []
    for i in range(CLIENTS):
        one = copy.deepcopy(module).double()
        for j, tensor in enumerate(one.parameters()):
            tensor.data = rng.normal(rng.key(0, i, j), tensor.numel(), torch.float64).view(tensor.shape)
        copies.append(one)
    return copies


def stacked_params(modules: list[nn.Module]) -> dict[str, torch.Tensor]:
    names = [name for name, _ in modules[0].named_parameters()]
    return {
        f"stage.{name}": torch.stack([m.get_parameter(name).detach() for m in modules]).requires_grad_(True)
        for name in names
    }


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("clients", [1, CLIENTS])
def test_stacked_values_and_gradients_are_those_of_each_clients_own_module(name, clients):
    module, shape = MODULES[name]
    modules = per_client(module)[:clients]
    params = stacked_params(modules)
    x = rng.normal(rng.key(1), clients * BATCH * torch.Size(shape).numel(), torch.float64)
    x = x.view(clients, BATCH, *shape).requires_grad_(True)
    out = apply_module(module, "stage", x, Pass(params, rng.key(0, torch.arange(clients)), training=True))
    weights = rng.normal(rng.key(2), out.numel(), torch.float64).view(out.shape)
    (out * weights).sum().backward()
    for i, one in enumerate(modules):
        own = x[i].detach().clone().requires_grad_(True)
        expected = one(own)
        (expected * weights[i]).sum().backward()
        torch.testing.assert_close(out[i], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(x.grad[i], own.grad, rtol=1e-12, atol=1e-12)
        for key, tensor in one.named_parameters():
            torch.testing.assert_close(params[f"stage.{key}"].grad[i], tensor.grad, rtol=1e-12, atol=1e-11)


def dropped(layer: nn.Module, x: torch.Tensor, keys: torch.Tensor, training: bool = True) -> torch.Tensor:
    return apply_module(nn.Sequential(layer), "s", x, Pass({}, keys, training=training))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Dropout(0.3), (50, 40)), (nn.Dropout2d(0.3), (50, 40, 2, 3)), (nn.Dropout1d(0.3), (50, 40, 3))],
)
def test_dropout_masks_are_keyed_by_client_and_drop_the_right_share(layer, shape):
    keys = rng.key(7, torch.arange(CLIENTS))
    out = dropped(layer, torch.ones(CLIENTS, *shape), keys)
    for i in range(CLIENTS):  # a client alone gets the same mask
        assert torch.equal(dropped(layer, torch.ones(1, *shape), keys[i : i + 1])[0], out[i])
    assert torch.equal(dropped(layer, torch.ones(2, *shape), keys[1:]), out[1:])
    assert not torch.equal(out[0], out[1])
    assert not torch.equal(dropped(layer, torch.ones(1, *shape), keys[:1] + 1)[0], out[0])
    kept = out != 0
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / 0.7))  # the mean is kept
    channels = kept.flatten(3) if out.ndim > 3 else kept[..., None]
    assert bool((channels.all(3) | ~channels.any(3)).all())  # whole channels, where the layer is about channels
    assert abs(float(kept.double().mean()) - 0.7) < 0.03  # standard error 0.006
    assert torch.equal(dropped(layer, torch.ones(CLIENTS, *shape), keys, training=False), torch.ones_like(out))


def test_two_dropouts_in_one_chain_have_different_masks():
    twice = nn.Sequential(nn.Dropout(0.5), nn.Identity(), nn.Dropout(0.5))
    out = apply_module(twice, "s", torch.ones(2, 40, 50), Pass({}, rng.key(0, torch.arange(2)), training=True))
    assert abs(float((out != 0).double().mean()) - 0.25) < 0.04  # 0.5 if the masks were the same


def test_dropouts_of_two_stages_have_different_masks():
    x, keys = torch.ones(2, 40, 50), rng.key(0, torch.arange(2))
    first = apply_module(nn.Dropout(0.5), "embedding", x, Pass({}, keys, training=True))
    second = apply_module(nn.Dropout(0.5), "body", x, Pass({}, keys, training=True))
    assert abs(float(((first != 0) & (second != 0)).double().mean()) - 0.25) < 0.04


def test_batch_norm_is_reported_and_runs_one_client_at_a_time():
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    assert why_not_stackable(module, (6,), "body") == ("body.1 (BatchNorm1d)", "batch-norm in training")
    mine = copy.deepcopy(module)
    params = {f"s.{k}": t.detach().clone().unsqueeze(0) for k, t in module.state_dict().items()}
    x = torch.randn(1, 8, 6, generator=torch.Generator().manual_seed(0))
    out = apply_module(module, "s", x, Pass(params, training=True))
    torch.testing.assert_close(out[0], mine.train()(x[0]))
    for name, tensor in mine.state_dict().items():  # running statistics moved as in the module itself
        torch.testing.assert_close(params[f"s.{name}"][0], tensor)
    assert int(params["s.1.num_batches_tracked"]) == 1
    evaluated = apply_module(module, "s", x, Pass(params, training=False))
    torch.testing.assert_close(evaluated[0], mine.eval()(x[0]))


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        (Noisy(), "body (Noisy)"),
        (Branching(), "body (Branching)"),
        (nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), Noisy())), "body.1.1 (Noisy)"),
        (nn.AlphaDropout(0.5), "body (AlphaDropout)"),
    ],
)
def test_the_layer_that_cannot_be_stacked_is_reported(module, layer):
    found = why_not_stackable(module, (6,), "body")
    assert found is not None and found[0] == layer
    assert found[1].startswith("cannot be batched over clients: ") and "\n" not in found[1]


@pytest.mark.parametrize("name", MODULES)
def test_what_can_be_stacked_is_not_reported(name):
    module, shape = MODULES[name]
    assert why_not_stackable(module, shape) is None


@pytest.mark.parametrize(
    "module", [Noisy(), nn.AlphaDropout(0.5), nn.TransformerEncoderLayer(6, 2, 8, dropout=0.5, batch_first=True)]
)
def test_other_random_modules_are_keyed_and_leave_the_global_generator_alone(module):
    x = torch.ones(1, 5, 4, 6)
    params = {f"s.{k}": t.detach().unsqueeze(0) for k, t in module.named_parameters()}
    outs = []
    for key in (1, 1, 2):
        before = torch.random.get_rng_state()
        outs.append(apply_module(module, "s", x, Pass(params, rng.key(key, torch.arange(1)), training=True)))
        assert torch.equal(torch.random.get_rng_state(), before)
        torch.rand(1)  # whatever else the program draws does not matter
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def test_threads_share_only_layers_that_a_pass_leaves_alone():
    plain = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8, 2)
    )
    assert is_thread_safe(plain)

    class Noisy(nn.Linear):
        pass

    for module in (
        nn.BatchNorm1d(2),
        nn.LSTM(2, 2),
        Noisy(2, 2),
        nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"),
    ):
        assert not is_thread_safe(module) and not is_thread_safe(nn.Sequential(nn.ReLU(), module))


def test_a_logit_has_the_binary_cross_entropy_of_one_output():

    module, x, y = logit()((5,)), torch.randn(7, 5), torch.randint(2, (7,))
    z = F.linear(x, module[0].weight, module[0].bias).squeeze(1)
    expected = F.binary_cross_entropy_with_logits(z, y.float())
    torch.testing.assert_close(F.cross_entropy(module(x), y), expected)
    with pytest.raises(PerfedError, match="a logit tells two classes apart, and there are 3"):
        logit(3)
