"""A client's fit is the plain PyTorch loop that anybody would write for that client alone."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engines import blobs, cohort, make, network, quick, serve
from torch import nn

from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.methods.flic.hetfedrep import HetFedRep
from perfed.methods.local import Local
from perfed.model.chain import STAGES, Model, stage_of
from perfed.model.presets import linear, mlp
from perfed.training.batches import Samples, count_steps, iterate_blocks, plan_batches
from perfed.training.cohort import Cohort
from perfed.training.steprules import CustomStep, DirectionStep, GradientTransform, ProximalStep

SIZES = (13, 9, 4, 1)


def local(**settings) -> Local:
    return quick(Local, **settings)


def minibatches(cohort: Cohort, row: int, *, epochs=None, steps=None, batch_size=4, fit=1) -> list[torch.Tensor]:
    """Sample indices of client ``row``'s mini-batches in its ``fit``-th fit, as if it were alone."""
    samples = Samples.pack([cohort.clients[row].train])
    count = len(cohort.clients[row].train)
    length = count_steps(samples.counts, batch_size, epochs, steps)
    key = cohort.key("fit", fit)[row : row + 1]
    plan = plan_batches(samples, key, batch_size=batch_size, steps=length)
    found = []
    for block in iterate_blocks(plan):
        for index, valid in zip(block.index[:, 0], block.valid[:, 0], strict=True):
            found.append(index[torch.from_numpy(valid)])
    # Whole epochs are permutations of the client's samples in parts of the batch size, the last one smaller.
    per_epoch = -(-count // batch_size)
    for first in range(0, len(found) - per_epoch + 1, per_epoch):
        epoch = found[first : first + per_epoch]
        assert [len(batch) for batch in epoch[:-1]] == [batch_size] * (per_epoch - 1)
        assert sorted(torch.cat(epoch).tolist()) == list(range(count))
    return found


def module_of(cohort: Cohort, row: int, model: Model | None = None) -> nn.Module:
    """The client's own module with its current parameters."""
    client = cohort.clients[row]
    chain = (model or network()).build(client.input_shape).to(cohort.dtype)
    values = {n: cohort.model[n][row][tuple(map(slice, t.shape))] for n, t in chain.state_dict().items()}
    chain.load_state_dict(values)
    return chain


def plain_loop(module, client, batches, make_optimizer, trained=STAGES, penalty=None) -> nn.Module:
    """What anybody would write."""
    module = copy.deepcopy(module)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(stage_of(name) in trained)
    module.eval()
    for stage in trained:
        getattr(module, stage).train()
    optimizer = make_optimizer(module)
    for index in batches:
        optimizer.zero_grad()
        out = module(client.train.x[index])
        y = client.train.y[index]
        loss = F.mse_loss(out.squeeze(1), y) if y.is_floating_point() else F.cross_entropy(out, y)
        if penalty is not None:
            loss = loss + penalty(module)
        loss.backward()
        optimizer.step()
    return module


def assert_equal(cohort: Cohort, row: int, module: nn.Module, tolerance: float = 1e-12) -> None:
    for name, tensor in module.state_dict().items():
        found = cohort.model[name][row][tuple(map(slice, tensor.shape))]
        torch.testing.assert_close(found, tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def decayed(weights_only: bool, decay: float, **options):
    def make(module):
        weights = [p for p in module.parameters() if p.ndim > 1]
        rest = [p for p in module.parameters() if p.ndim <= 1]
        other = 0.0 if weights_only else decay
        return torch.optim.SGD(
            [{"params": weights, "weight_decay": decay}, {"params": rest, "weight_decay": other}], **options
        )

    return make


def per_stage(module):
    rates = {"embedding": 0.05, "body": 1e-3, "head": 0.2}
    return torch.optim.Adam([{"params": getattr(module, s).parameters(), "lr": lr} for s, lr in rates.items()])


OPTIMIZERS = {
    "adam": ({"lr": 0.02}, lambda m: torch.optim.Adam(m.parameters(), lr=0.02)),
    "sgd": ({"optimizer": "sgd", "lr": 0.1}, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)),
    "sgd with momentum": (
        {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9},
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    ),
    "sgd with decay of weights": (
        {"optimizer": "sgd", "lr": 0.1, "momentum": 0.5, "weight_decay": 0.3},
        decayed(True, 0.3, lr=0.1, momentum=0.5),
    ),
    "sgd with decay of everything": (
        {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.3, "decay": "all"},
        decayed(False, 0.3, lr=0.1),
    ),
    "adam with decay": (
        {"lr": 0.02, "weight_decay": 0.3, "decay": "all"},
        lambda m: torch.optim.Adam(m.parameters(), lr=0.02, weight_decay=0.3),
    ),
    "a learning rate per stage": ({"lr": {"embedding": 0.05, "head": 0.2}}, per_stage),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_client_of_a_ragged_stack_gets_the_plain_loop(name):
    settings, make_optimizer = OPTIMIZERS[name]
    federation = blobs(SIZES)
    group = cohort(local(**settings), federation)
    expected = [
        plain_loop(module_of(group, row), client, minibatches(group, row, epochs=3), make_optimizer)
        for row, client in enumerate(group.clients)
    ]
    group.fit(STAGES, epochs=3)
    for row, module in enumerate(expected):
        assert_equal(group, row, module)
    assert group.steps_done.tolist() == [12, 9, 3, 3]


def test_the_order_of_the_clients_in_a_stack_does_not_matter():
    federation = blobs(SIZES)
    one, other = cohort(local(), federation), cohort(local(), federation, ids=["c2", "c0", "c3", "c1"])
    one.fit(STAGES, epochs=2)
    other.fit(STAGES, epochs=2)
    for name, tensor in one.model.items():
        torch.testing.assert_close(other.model[name], tensor[[2, 0, 3, 1]], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(other.train_loss, one.train_loss[[2, 0, 3, 1]])


@pytest.mark.parametrize("steps", [1, 5, 11])
def test_a_fit_of_some_steps_goes_round_the_data_as_often_as_needed(steps):
    federation = blobs(SIZES)
    group = cohort(local(), federation)
    expected = []
    for row, client in enumerate(group.clients):
        batches = minibatches(group, row, steps=steps)
        assert len(batches) == steps
        make = lambda m: torch.optim.Adam(m.parameters(), lr=1e-2)  # noqa: E731
        expected.append(plain_loop(module_of(group, row), client, batches, make))
    group.fit(STAGES, steps=steps)
    for row, module in enumerate(expected):
        assert_equal(group, row, module)


def test_every_client_may_have_its_own_number_of_epochs():
    federation = blobs(SIZES)
    group = cohort(local(), federation)
    epochs = [1, 0, 9, 4]
    make = lambda m: torch.optim.Adam(m.parameters(), lr=1e-2)  # noqa: E731
    expected = [
        plain_loop(module_of(group, row), client, minibatches(group, row, epochs=epochs[row]), make)
        for row, client in enumerate(group.clients)
    ]
    group.fit(STAGES, epochs=np.array(epochs))
    for row, module in enumerate(expected):
        assert_equal(group, row, module)
    assert group.train_loss[1].isnan() and not group.train_loss[[0, 2, 3]].isnan().any()


def test_clients_with_inputs_of_different_lengths_share_a_stack():
    federation = blobs(SIZES, dims=(3, 7, 5))
    group = cohort(local(), federation)
    assert group.model["embedding.0.weight"].shape == (4, 6, 7)
    make = lambda m: torch.optim.Adam(m.parameters(), lr=1e-2)  # noqa: E731
    expected = [
        plain_loop(module_of(group, row), client, minibatches(group, row, epochs=3), make)
        for row, client in enumerate(group.clients)
    ]
    group.fit(STAGES, epochs=3)
    for row, module in enumerate(expected):
        assert_equal(group, row, module)
        dim = group.clients[row].input_shape[0]
        assert not group.model["embedding.0.weight"][row, :, dim:].any()  # padding stays zero


def test_regression_is_fitted_with_the_squared_error():
    federation = blobs((9, 4), regression=True)
    model = Model(embedding=mlp((6,), 3), head=linear(1))
    group = cohort(local(), federation, model=model)
    make = lambda m: torch.optim.Adam(m.parameters(), lr=1e-2)  # noqa: E731
    trained = ("embedding", "head")
    expected = [
        plain_loop(module_of(group, r, model), c, minibatches(group, r, epochs=2), make, trained)
        for r, c in enumerate(group.clients)
    ]
    group.fit(STAGES, epochs=2)
    for row, module in enumerate(expected):
        assert_equal(group, row, module)


@pytest.mark.parametrize("trained", [("head",), ("body", "head"), ("embedding", "head"), ("embedding",)])
def test_training_some_stages_leaves_the_others_and_their_dropout_alone(trained):
    model = network(dropout=0.5)
    federation = blobs(SIZES)
    group = cohort(local(), federation, model=model)
    before = {name: tensor.clone() for name, tensor in group.model.items()}
    make = lambda m: torch.optim.Adam([p for p in m.parameters() if p.requires_grad], lr=1e-2)  # noqa: E731
    starts = [module_of(group, row, model) for row in range(group.n)]
    group.fit(trained, epochs=2)
    for name, tensor in group.model.items():
        assert torch.equal(tensor, before[name]) == (stage_of(name) not in trained), name
    if "embedding" in trained:
        return  # its dropout masks are not those of torch's generator
    for row, client in enumerate(group.clients):
        batches = minibatches(group, row, epochs=2)
        assert_equal(group, row, plain_loop(starts[row], client, batches, make, trained))


def test_a_stage_between_the_trained_ones_runs_without_dropout():
    model = Model(embedding=mlp((6,), 3), body=mlp((8,), 5, dropout=0.5), head=linear(3))
    group = cohort(local(), blobs(SIZES), model=model)
    trained = ("embedding", "head")
    make = lambda m: torch.optim.Adam([p for p in m.parameters() if p.requires_grad], lr=1e-2)  # noqa: E731
    expected = [
        plain_loop(module_of(group, r, model), c, minibatches(group, r, epochs=2), make, trained)
        for r, c in enumerate(group.clients)
    ]
    group.fit(trained, epochs=2)
    for row, module in enumerate(expected):
        assert_equal(group, row, module)
    with_dropout = cohort(local(), blobs(SIZES), model=model)
    with_dropout.fit(STAGES, epochs=2)
    assert not torch.equal(with_dropout.model["head.weight"], group.model["head.weight"])


def test_every_epoch_is_a_new_shuffle_and_every_client_has_its_own():
    group = cohort(local(), blobs((20, 20)))
    epochs = []
    for row in range(2):
        order = torch.cat(minibatches(group, row, epochs=3))
        epochs += [tuple(order[i : i + 20].tolist()) for i in (0, 20, 40)]
    assert len(set(epochs)) == 6 and all(epoch != tuple(range(20)) for epoch in epochs)


def test_features_of_a_frozen_prefix_give_what_recomputing_them_gives():
    federation = blobs(SIZES, dims=(3, 5))
    fast, slow = cohort(local(), federation), cohort(local(), federation)
    seen = {"embedding": 0}

    def recomputed(step):
        z = step.x
        for stage in slow.chain.stages[step.start :]:
            z = step.apply(stage, z)
        losses = F.cross_entropy(z.flatten(0, 1), step.y.flatten(), reduction="none").view(step.weight.shape)
        assert step.output("embedding").shape[-1] == 3  # also below the first trained stage
        torch.testing.assert_close(
            step.apply_after("embedding", step.output("embedding")), step.output(), rtol=1e-12, atol=1e-12
        )
        seen["embedding"] += 1
        return (losses * step.weight).sum(1)

    fast.fit("head", epochs=3)
    slow.fit("head", epochs=3, loss=recomputed)
    assert seen["embedding"] > 0
    for name, tensor in fast.model.items():
        torch.testing.assert_close(slow.model[name], tensor, rtol=1e-12, atol=1e-12)


# Parameters per domain ---------------------------------------------------------------------------------------


def rare_domains() -> Federation:
    """Domain 2 has one sample in the first client, and all of the last one's."""
    ids = ([0] * 7 + [2] + [0] * 4 + [1], [0, 1, 2] * 3, [1] * 4, [2])
    clients = zip(blobs(SIZES), ids, strict=True)
    return replace(
        blobs(SIZES), clients=tuple(replace(c, train=replace(c.train, domain=torch.tensor(d))) for c, d in clients)
    )


def with_heads(**settings) -> Cohort:
    """The head has values of its own for each of the domains."""
    group = cohort(local(placement={"head": "per-domain"}, **settings), rare_domains())
    generator = torch.Generator().manual_seed(0)
    for name in ("head.weight", "head.bias"):
        shape = (4, 3, *group.chain.get_parameter(name).shape)
        group.model[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
    return group


def loop_per_domain(group, row, batches, make_optimizer, trained) -> dict[str, torch.Tensor]:
    """Body and each domain's head with an optimiser of their own; a head's steps when a sample is in the batch."""
    client, chains = group.clients[row], []
    for domain in range(3):
        chains.append(copy.deepcopy(group.chain))
        own = {n: t[row, domain] if n.startswith("head") else t[row] for n, t in group.model.items()}
        chains[-1].load_state_dict(own)
        for name, parameter in chains[-1].named_parameters():
            parameter.requires_grad_(stage_of(name) in trained)
    rest, optimizers = chains[0], [make_optimizer(chain) for chain in chains]
    for index in batches:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)  # it leaves what has no gradient as it is
        x, y, domain = client.train.x[index], client.train.y[index], client.train.domain[index]
        features = rest.body(rest.embedding(x))
        logits = torch.stack([chains[int(m)].head(f) for m, f in zip(domain, features, strict=True)])
        F.cross_entropy(logits, y).backward()
        for optimizer in optimizers:
            optimizer.step()
    heads = {f"head.{n}": torch.stack([c.head.state_dict()[n] for c in chains]) for n in ("weight", "bias")}
    return {**rest.state_dict(), **heads}


@pytest.mark.parametrize("trained", [STAGES, ("head",)], ids=["all stages", "the head"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_head_without_a_sample_in_the_mini_batch_takes_no_step(name, trained):
    settings, make_optimizer = OPTIMIZERS[name]
    group = with_heads(**settings)
    expected = [
        loop_per_domain(group, row, minibatches(group, row, epochs=5), make_optimizer, trained) for row in range(4)
    ]
    before = {name: tensor.clone() for name, tensor in group.model.items()}
    group.fit(trained, epochs=5)
    for row, tensors in enumerate(expected):
        for key, tensor in tensors.items():
            torch.testing.assert_close(group.model[key][row], tensor, rtol=1e-12, atol=1e-12, msg=f"{row} {key}")
    held = [[m in c.train.domain for m in range(3)] for c in group.clients]
    moved = (group.model["head.weight"] != before["head.weight"]).flatten(2).any(2)
    assert moved.tolist() == held


def test_nothing_else_moves_such_a_head_either():
    """Neither a pull towards other values, nor an update in place of the optimiser, nor one along a direction."""

    def ahead(params, gradient, batches):
        return {name: tensor + 1 for name, tensor in params.items()}

    towards_zero = ProximalStep({"head.weight": torch.zeros(4, 3, 3, 5).double()}, pull=0.5)
    for update in (towards_zero, CustomStep(ahead), DirectionStep(ahead, streams=2)):
        for optimizer in ("sgd", "adam"):
            group = with_heads(optimizer=optimizer, lr=0.1)
            before = group.model["head.weight"].clone()
            group.fit("head", epochs=2, update=update)
            moved = (group.model["head.weight"] != before).flatten(2).all(2)
            assert moved.tolist() == [[m in c.train.domain for m in range(3)] for c in group.clients]


def test_one_parameter_of_a_head_per_domain_can_be_trained_alone():
    group, expected = with_heads(), with_heads()
    expected.fit("head", epochs=1, update=GradientTransform(lambda step, grads: {"head.weight": grads["head.weight"]}))
    group.fit(("head.weight",), epochs=1)
    torch.testing.assert_close(group.model["head.weight"][3], expected.model["head.weight"][3])  # one step
    assert torch.equal(group.model["head.bias"], with_heads().model["head.bias"])


def normed(shape):
    return nn.Sequential(nn.Linear(shape[0], 6), nn.BatchNorm1d(6), nn.ReLU())


def test_batch_norm_runs_one_client_at_a_time_and_its_statistics_move():
    model = Model(embedding=normed, head=linear(3))
    federation = blobs((12, 8, 6))
    group = cohort(local(batch_size=3, optimizer="sgd", lr=0.1), federation, model=model)
    assert group.layout.unstackable == "batch-norm in training"
    make = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
    expected = [
        plain_loop(
            module_of(group, r, model), c, minibatches(group, r, epochs=2, batch_size=3), make, ("embedding", "head")
        )
        for r, c in enumerate(group.clients)
    ]
    group.fit(STAGES, epochs=2)
    for row, module in enumerate(expected):
        assert_equal(group, row, module)
    assert group.model["embedding.1.num_batches_tracked"].tolist() == [8, 6, 4]
    assert not torch.equal(group.model["embedding.1.running_mean"][0], torch.zeros(6).double())


def test_batch_norm_of_a_stage_that_is_not_trained_keeps_its_statistics():
    model = Model(embedding=normed, head=linear(3))
    group = cohort(local(), blobs((12, 8)), model=model)
    group.fit("head", epochs=1)
    assert group.model["embedding.1.num_batches_tracked"].tolist() == [0, 0]


def test_penalties_and_corrections_are_those_of_each_client():
    federation = blobs(SIZES)
    group = cohort(local(optimizer="sgd", lr=0.1), federation)
    pull = torch.arange(1.0, 5.0).double()

    def penalty(step):
        return step.select_rows(pull) * step.params["head.weight"].square().flatten(1).sum(1)

    def correct(step, grads):
        return {name: g if name != "head.bias" else g + step.select_rows(pull)[:, None] for name, g in grads.items()}

    def make(row):
        def build(module):
            module.head.bias.register_hook(lambda g: g + float(pull[row]))
            return torch.optim.SGD(module.parameters(), lr=0.1)

        return build

    expected = [
        plain_loop(
            module_of(group, row),
            client,
            minibatches(group, row, epochs=2),
            make(row),
            penalty=lambda m, row=row: float(pull[row]) * m.head.weight.square().sum(),
        )
        for row, client in enumerate(group.clients)
    ]
    group.penalties = [penalty]
    group.fit(STAGES, epochs=2, update=GradientTransform(correct))
    for row, module in enumerate(expected):
        assert_equal(group, row, module)


def test_another_set_of_parameters_is_trained_in_place():
    federation = blobs(SIZES)
    group, other = cohort(local(), federation), cohort(local(), federation)
    before = {name: tensor.clone() for name, tensor in group.model.items()}
    mine = {name: tensor.clone() for name, tensor in group.model.items()}
    group.fit(STAGES, epochs=2, params=mine)
    other.fit(STAGES, epochs=2)
    for name in before:
        assert torch.equal(group.model[name], before[name])
        assert torch.equal(mine[name], other.model[name])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sizes", [SIZES, SIZES[::-1]])
def test_a_set_shown_to_every_client_can_be_trained_and_its_source_stays_as_it_is(sizes):
    """What a program receives is one tensor shown to all clients: training it must copy first."""
    group, again = cohort(local(), blobs(sizes)), cohort(local(), blobs(sizes))
    source = {name: tensor[0].clone() for name, tensor in group.model.items()}
    before = {name: tensor.clone() for name, tensor in source.items()}
    shown = {name: tensor.expand(group.n, *tensor.shape) for name, tensor in source.items()}
    copied = {name: tensor.clone() for name, tensor in shown.items()}
    group.fit("head", epochs=2, params=shown)
    again.fit("head", epochs=2, params=copied)
    for name in source:
        assert torch.equal(source[name], before[name]), f"{name} was changed behind the caller's back"
        assert torch.equal(shown[name], copied[name])
    assert not torch.equal(shown["head.weight"][0], source["head.weight"])


def test_optimiser_state_is_fresh_in_every_fit_and_the_order_is_not():
    federation = blobs(SIZES)
    group = cohort(local(), federation)
    make = lambda m: torch.optim.Adam(m.parameters(), lr=1e-2)  # noqa: E731
    expected = []
    for row, client in enumerate(group.clients):
        module = module_of(group, row)
        for fit in (1, 2):
            module = plain_loop(module, client, minibatches(group, row, epochs=2, fit=fit), make)
        expected.append(module)
    assert [b.tolist() for b in minibatches(group, 0, epochs=1)] != [
        b.tolist() for b in minibatches(group, 0, epochs=1, fit=2)
    ]
    group.fit(STAGES, epochs=2)
    group.fit(STAGES, epochs=2)
    for row, module in enumerate(expected):
        assert_equal(group, row, module)


def test_the_training_loss_is_the_mean_over_the_steps():
    federation = blobs(SIZES)
    group = cohort(local(lr=0.0), federation)
    expected = []
    for row, client in enumerate(group.clients):
        module = module_of(group, row)
        losses = [
            F.cross_entropy(module(client.train.x[i]), client.train.y[i]) for i in minibatches(group, row, epochs=2)
        ]
        expected.append(torch.stack(losses).mean().detach())
    group.fit(STAGES, epochs=2)
    torch.testing.assert_close(group.train_loss, torch.stack(expected))


@pytest.mark.parametrize("chunk", [0, 1])
def test_a_loss_that_is_not_a_number_names_the_round_and_the_client(chunk):
    federation = blobs(SIZES)
    group = cohort(local(optimizer="sgd", lr=1.0), federation, chunk=chunk, round_=3)
    group.model["head.weight"][2] = float("nan")
    with pytest.raises(PerfedError, match="round 3: the training loss of client 'c2' became nan") as error:
        group.fit(STAGES, epochs=1)
    assert "\n" not in str(error.value)


def test_stages_that_the_model_does_not_have_are_skipped_and_frozen_ones_stay():
    federation = blobs((8, 5))
    frozen = cohort(quick(HetFedRep, placement={"head": "frozen"}), federation)
    before = frozen.model["head.weight"].clone()
    assert frozen.trainable_names(STAGES)[-1].startswith("body")
    frozen.load(frozen_body(frozen))
    frozen.fit(STAGES, epochs=1)
    assert torch.equal(frozen.model["head.weight"], before)
    headless = cohort(local(), federation, model=Model(embedding=mlp((6,), 3)))
    headless.fit("body", epochs=1)
    assert headless.train_loss.isnan().all()


def frozen_body(group: Cohort):
    shapes = {n: t.shape for n, t in group.chain.tensors().items() if n.startswith("body")}
    return {name: torch.ones(group.n, *shape, dtype=group.dtype) / 10 for name, shape in shapes.items()}


def test_a_fit_needs_a_length():
    group = cohort(local(), blobs((5,)))
    for wrong in ({}, {"epochs": 1, "steps": 1}):
        with pytest.raises(ValueError, match="either epochs or steps"):
            group.fit(STAGES, **wrong)


def test_float32_stays_close_to_float64():
    federation = blobs(SIZES)
    one, other = cohort(local(), federation, dtype=torch.float32), cohort(local(), federation)
    one.fit(STAGES, epochs=1)
    other.fit(STAGES, epochs=1)
    for name, tensor in one.model.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor.double(), other.model[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("engine", ["stacked", "sequential"])
def test_features_are_those_of_the_parameters_of_now(optimizer, engine):
    """They are kept between uses; fused optimisers change parameters without a trace in the tensors' versions."""
    method = make("fedrep", optimizer=optimizer, lr=0.05)
    clients = ["c0"] if engine == "sequential" else None
    group = cohort(method, blobs((9, 5, 7)), ids=clients, engine=engine)
    group.load({n: t.expand(group.n, *t.shape) for n, t in serve(method, blobs((9, 5, 7))).state.shared.items()})
    for part in ("head", "body", ("embedding", "body")):
        before = group.representation()
        assert group.representation() is before
        group.fit(part, epochs=2)
        found, start = group.representation(), 0
        for row, client in enumerate(group.clients):
            group.chain.load_state_dict({name: t[row] for name, t in group.model.items()})
            with torch.no_grad():
                expected = group.chain.body(group.chain.embedding(client.train.x))
            torch.testing.assert_close(found[start : start + len(expected)], expected)
            start += len(expected)
        assert torch.equal(found, before) == (part == "head")


@pytest.mark.parametrize("way", ["descend", "step"])
@pytest.mark.parametrize("sizes", [SIZES, SIZES[::-1]])
def test_a_matrix_that_cannot_be_factorised_names_the_client_whose_it_is(sizes, way):
    federation = blobs(sizes)
    group = cohort(local(), federation, round_=3)
    wrong = torch.tensor([client == "c2" for client in group.ids])

    def loss(step):
        sign = torch.where(step.select_rows(wrong), -1.0, 1.0)[:, None, None]
        return step.output().square().mean((1, 2)) + torch.linalg.cholesky(sign * torch.eye(3)).sum((1, 2))

    def update(params, gradient, batches):
        return {name: t - 0.1 * gradient(params, batches[0])[name] for name, t in params.items()}

    says = r"^round 3: training of client 'c2' diverged: linalg\.cholesky failed on values that are no longer finite"
    with pytest.raises(PerfedError, match=says):
        group.fit("head", epochs=2, loss=loss, update=CustomStep(update) if way == "step" else None)
