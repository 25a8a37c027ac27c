"""The yardstick: personalised federated training as a plain PyTorch loop, one client after another.

What a careful engineer writes by hand without any framework: data in memory, mini-batches by index, ordinary
modules, fused optimisers, gradients dropped rather than zeroed, no host sync in the inner loop, the better
thread count and memory layout. Each function trains one client in place; loop over the clients.

``python benchmarks/yardstick.py`` prints its own microseconds per client and mini-batch step.
"""

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer
from usage import usage

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

RIDGE = 1e-7  # relative; without it float32 eigh may not converge on a Gram matrix padded with zero rows
CUT = 1e-3  # singular values below this share of the largest give no direction in the gradient


def adam(lr: float = 1e-3) -> MakeOptimizer:
    return lambda parameters: Adam(parameters, lr=lr, fused=True)


def sgd(lr: float = 1e-2, momentum: float = 0.0) -> MakeOptimizer:
    return lambda parameters: SGD(parameters, lr=lr, momentum=momentum, fused=True)


# ---------------------------------------------------------------------------------------------- training


def train_plain(model: nn.Module, x: Tensor, y: Tensor, *, epochs: int, batch: int, optimizer: MakeOptimizer) -> None:
    """Minimise the cross-entropy of one client's model: Local training, and a client's part of FedAvg."""
    parameters = list(model.parameters())
    opt = optimizer(parameters)
    for _ in range(epochs):
        for xb, yb in _minibatches(x, y, batch):
            F.cross_entropy(model(xb), yb).backward()
            _step(opt, parameters)


def train_fedrep(
    body: nn.Module, head: nn.Module, x: Tensor, y: Tensor,
    *, head_epochs: int, body_epochs: int, batch: int, optimizer: MakeOptimizer,
) -> None:  # fmt: skip
    """Train the head on the frozen body (features recomputed every mini-batch), then the body under it."""
    parameters = list(head.parameters())
    opt = optimizer(parameters)
    for _ in range(head_epochs):
        for xb, yb in _minibatches(x, y, batch):
            with torch.no_grad():
                features = body(xb)
            F.cross_entropy(head(features), yb).backward()
            _step(opt, parameters)
    head.requires_grad_(False)
    parameters = list(body.parameters())
    opt = optimizer(parameters)
    for _ in range(body_epochs):
        for xb, yb in _minibatches(x, y, batch):
            F.cross_entropy(head(body(xb)), yb).backward()
            _step(opt, parameters)
    head.requires_grad_(True)


def pretrain_flic(
    embedding: nn.Module, anchors: Tensor, x: Tensor, y: Tensor,
    *, epochs: int, batch: int, optimizer: MakeOptimizer, scale: float = 1.0,
) -> None:  # fmt: skip
    """Align the classes of one client, as embedded, with the Gaussian anchors N(anchors[c], scale I)."""
    parameters = list(embedding.parameters())
    opt = optimizer(parameters)
    for xb, _, group in _grouped_minibatches(x, y, anchors, epochs, batch):
        wasserstein(embedding(xb), group, scale).backward()
        _step(opt, parameters)


def train_flic(
    embedding: nn.Module, head: nn.Module, anchors: Tensor, x: Tensor, y: Tensor,
    *, epochs: int, batch: int, optimizer: MakeOptimizer, lam1: float, lam2: float, samples: int,
) -> None:  # fmt: skip
    """One client's step of FLIC: cross-entropy + lam1 alignment + lam2 cross-entropy of anchor draws."""
    parameters = [*embedding.parameters(), *head.parameters()]
    opt = optimizer(parameters)
    for xb, yb, group in _grouped_minibatches(x, y, anchors, epochs, batch):
        phi = embedding(xb)
        num_classes, _, dim = group.anchors.shape
        draws = torch.randn(num_classes, samples, dim, device=x.device).add_(group.anchors).view(-1, dim)
        drawn = group.classes.repeat_interleave(samples, output_size=len(draws))
        calibration = F.cross_entropy(head(draws), drawn, reduction="sum")
        loss = F.cross_entropy(head(phi), yb) + lam1 * wasserstein(phi, group) + lam2 / samples * calibration
        loss.backward()
        _step(opt, parameters)


def _step(opt: Optimizer, parameters: list[nn.Parameter]) -> None:
    opt.step()
    for p in parameters:  # as zero_grad(set_to_none=True), without its profiler record (16 us a step)
        p.grad = None


def _minibatches(x: Tensor, y: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One shuffled epoch: one gather, then views of it."""
    order = torch.randperm(len(y), device=y.device)
    xs = x[order] if x.dim() == 4 else x.index_select(0, order)  # keeps channels_last
    return zip(xs.split(batch), y.index_select(0, order).split(batch), strict=True)


# ------------------------------------------------------------------------------ alignment with the anchors


class Group(NamedTuple):
    """The members of each class of a mini-batch, padded to the largest class: G classes of at most n rows."""

    rows: Tensor  # (G * n,) row of the mini-batch, 0 where padded
    place: Tensor  # (batch,) inverse of rows: where each row went
    mean: Tensor  # (G, 1, n) 1 / size of the class; 0 where padded
    spread: Tensor  # (G, n, 1) 1 / sqrt(size - 1); 0 where padded and in a class of one
    pull: Tensor  # (G, 1, 1) 2 / size
    anchors: Tensor  # (G, 1, k)
    classes: Tensor  # (G,)


def _grouped_minibatches(
    x: Tensor, y: Tensor, anchors: Tensor, epochs: int, batch: int
) -> Iterator[tuple[Tensor, Tensor, Group]]:
    """Shuffled mini-batches of all epochs with their classes gathered; every index is made in one go."""
    order = torch.rand(epochs, len(y), device=y.device).argsort(1)
    groups = iter(_groups(y[order], batch, anchors))
    for epoch in order.unbind():
        xs = x[epoch] if x.dim() == 4 else x.index_select(0, epoch)
        for xb, yb in zip(xs.split(batch), y.index_select(0, epoch).split(batch), strict=True):
            yield xb, yb, next(groups)


def _groups(labels: Tensor, batch: int, anchors: Tensor) -> list[Group]:
    """Group the rows of every mini-batch by class; labels is (epochs, samples) in training order."""
    epochs, num = labels.shape
    num_classes, per_epoch = len(anchors), math.ceil(num / batch)
    column = torch.arange(num, device=labels.device).expand(epochs, num)
    step = (column // batch + per_epoch * torch.arange(epochs, device=labels.device)[:, None]).flatten()
    row = (column % batch).flatten()
    key, group, size = torch.unique(step * num_classes + labels.flatten(), return_inverse=True, return_counts=True)
    by_group = group.argsort(stable=True)
    rank = torch.empty_like(group)
    rank[by_group] = torch.arange(len(group), device=group.device) - (size.cumsum(0) - size)[group[by_group]]
    in_step = torch.bincount(key // num_classes)
    width = torch.zeros_like(in_step).scatter_reduce_(0, key // num_classes, size, "amax")
    place = (group - (in_step.cumsum(0) - in_step)[step]) * width[step] + rank

    count = size.to(anchors.dtype)
    padded = (len(key), int(size.max()))
    index, mean, spread = row.new_zeros(padded), anchors.new_zeros(padded), anchors.new_zeros(padded)
    index[group, rank] = row
    mean[group, rank] = 1 / count[group]
    spread[group, rank] = torch.where(count > 1, (count - 1).clamp(min=1).rsqrt(), 0)[group]
    classes, cuts = key % num_classes, in_step.tolist()
    in_epoch = [min(batch, num - start) for start in range(0, num, batch)]
    return [
        Group(i[:, :w].flatten(), at, m[:, :, :w], s[:, :w], *rest)
        for w, at, i, m, s, *rest in zip(
            width.tolist(),
            place.split(in_epoch * epochs),
            index.split(cuts),
            mean[:, None].split(cuts),
            spread[:, :, None].split(cuts),
            (2 / count)[:, None, None].split(cuts),
            anchors[classes, None].split(cuts),
            classes.split(cuts),
            strict=True,
        )
    ]


def wasserstein(phi: Tensor, group: Group, scale: float = 1.0) -> Tensor:
    """Sum of W2^2(N(anchor, scale I), N(mean, covariance of the rows of phi)) over the classes present.

    |anchor - mean|^2 + scale k + tr S - 2 sqrt(scale) |X|_*, X the centred rows over sqrt(n - 1), S = X'X; a
    class of one row has S = 0. Returns a scalar; its gradient is exact up to CUT.
    """
    return _Wasserstein.apply(phi, group, scale)  # type: ignore[no-untyped-call, no-any-return]


class _Wasserstein(torch.autograd.Function):
    """All classes in one batched eigh of Gram matrices on the small side, which gives the gradient too."""

    @staticmethod
    def forward(ctx: Any, phi: Tensor, group: Group, scale: float) -> Tensor:
        dim, root = phi.shape[1], math.sqrt(scale)
        members = phi.index_select(0, group.rows).view(len(group.classes), -1, dim)
        mean = torch.bmm(group.mean, members)
        off = mean - group.anchors
        x = (members - mean).mul_(group.spread)
        wide = x.shape[1] <= dim
        gram = torch.bmm(x, x.mT) if wide else torch.bmm(x.mT, x)
        diagonal = gram.diagonal(dim1=1, dim2=2)
        diagonal.add_(diagonal.sum(1, keepdim=True), alpha=RIDGE)
        values, q = torch.linalg.eigh(gram)
        singular = values.clamp_(min=0).sqrt_()
        inverse = singular.reciprocal().masked_fill_(singular <= CUT * singular[:, -1:], 0)
        scaled = q * inverse.mul_(-2 * root).add_(2).unsqueeze(1)  # gradient 2 X - 2 root polar(X)
        grad = torch.bmm(scaled, torch.bmm(q.mT, x)) if wide else torch.bmm(torch.bmm(x, scaled), q.mT)
        grad.mul_(group.spread).addcmul_(off, group.pull)
        ctx.grad = grad.view(-1, dim).index_select(0, group.place)
        # tr S - 2 root |X|_* + scale k = sum over all k of (s_j - root)^2, s_j = 0 beyond the small side
        missing = scale * (dim - singular.shape[1]) * len(singular)
        total: Tensor = off.square_().sum() + singular.sub_(root).square_().sum() + missing
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return ctx.grad * upstream, None, None


def _self_check() -> None:
    """Value and gradient against float64 autograd of the nuclear norm; one class of one row, both sides."""
    torch.manual_seed(0)
    for num, dim, scale in ((10, 64, 1.0), (60, 8, 2.5)):
        phi = torch.randn(num, dim, dtype=torch.float64, requires_grad=True)
        anchors = 3 * torch.randn(5, dim, dtype=torch.float64)
        y = torch.cat([torch.tensor([4]), torch.arange(num - 1) % 3])  # class 3 is absent
        expected = torch.zeros((), dtype=torch.float64)
        for c in (0, 1, 2, 4):
            rows = phi[y == c]
            expected = expected + (rows.mean(0) - anchors[c]).square().sum() + scale * dim
            if len(rows) > 1:
                x = (rows - rows.mean(0)) / math.sqrt(len(rows) - 1)
                nuclear = torch.linalg.matrix_norm(x, ord="nuc")
                expected = expected + x.square().sum() - 2 * math.sqrt(scale) * nuclear
        (reference,) = torch.autograd.grad(expected, phi)
        for dtype, tolerance in ((torch.float64, 1e-5), (torch.float32, 1e-3)):
            leaf = phi.detach().to(dtype).requires_grad_()
            value = wasserstein(leaf, _groups(y[None], num, anchors.to(dtype))[0], scale)
            (grad,) = torch.autograd.grad(value, leaf)
            assert abs(value.item() - expected.item()) < 1e-3 * expected.item(), (value, expected)
            assert (grad.double() - reference).norm() < tolerance * reference.norm(), (dtype, dim)


# ------------------------------------------------------------------------------------------------- models


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them and a linear output."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn(side: int, *channels: int, classes: int = 10) -> nn.Sequential:
    """5 x 5 convolutions, each with ReLU and 2 x 2 max-pooling, then 128 features and a linear head."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(channels):
        layers += [nn.Conv2d(before, after, 5, padding=2), nn.MaxPool2d(2), nn.ReLU()]  # = ReLU, then pool
        side //= 2
    layers += [nn.Flatten(), nn.Linear(channels[-1] * side * side, 128), nn.ReLU(), nn.Linear(128, classes)]
    return nn.Sequential(*layers)


# -------------------------------------------------------------------------------------------- measurement

Client = Callable[[], None]  # trains one fresh client when called


def measure(
    make: Callable[[bool], Client], *, clients: int, steps: int, images: bool = False
) -> tuple[float, int, bool]:
    """Median microseconds per client and step, the thread count and whether channels_last, as chosen.

    make(channels_last) gives a client that takes so many steps; a short warm-up tries the settings (layouts
    for images only).
    """
    default = torch.get_num_threads()
    settings = itertools.product({1, default}, (False, True) if images else (False,))
    warm_up = {setting: _median_seconds(make, max(3, clients // 5), *setting) for setting in settings}
    threads, channels_last = min(warm_up, key=warm_up.__getitem__)
    seconds = _median_seconds(make, clients, threads, channels_last)
    torch.set_num_threads(default)
    return 1e6 * seconds / steps, threads, channels_last


def _median_seconds(make: Callable[[bool], Client], clients: int, threads: int, channels_last: bool) -> float:
    torch.set_num_threads(threads)
    make(channels_last)()  # the first use of a kernel or a shape pays for its setting up
    seconds = []
    for client in [make(channels_last) for _ in range(clients)]:
        start = time.perf_counter()
        client()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _plain(build: Callable[[], nn.Module], shape: tuple[int, ...], num: int, batch: int, epochs: int = 1) -> Any:
    def make(channels_last: bool) -> Client:
        model, x, y = build(), torch.randn(num, *shape), torch.randint(0, 10, (num,))
        if channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            x = x.contiguous(memory_format=torch.channels_last)
        return lambda: train_plain(model, x, y, epochs=epochs, batch=batch, optimizer=adam())

    return make


def _fedrep(_: bool) -> Client:
    body, head = nn.Sequential(mlp(15, 64, 64), nn.ReLU()), nn.Linear(64, 20)
    x, y, opt = torch.randn(160, 15), torch.randint(0, 20, (160,)), adam()
    return lambda: train_fedrep(body, head, x, y, head_epochs=10, body_epochs=1, batch=10, optimizer=opt)


def _flic(num: int, batch: int, epochs: int, local: bool) -> Any:
    def make(_: bool) -> Client:
        embedding, head, anchors = mlp(15, 64, 64, 64), nn.Linear(64, 20), 10 * torch.randn(20, 64)
        x, y = torch.randn(num, 15), torch.randperm(20)[:3][torch.randint(0, 3, (num,))]
        plan: dict[str, Any] = {"epochs": epochs, "batch": batch, "optimizer": adam()}
        if not local:
            return lambda: pretrain_flic(embedding, anchors, x, y, **plan)
        plan |= {"lam1": 1e-3, "lam2": 1e-3, "samples": batch}
        return lambda: train_flic(embedding, head, anchors, x, y, **plan)

    return make


def _mlp784() -> nn.Module:
    return mlp(784, 512, 256, 64, 10)


def _cnn32() -> nn.Module:
    return cnn(32, 3, 16, 32, 64)


ROWS: dict[str, tuple[Callable[[bool], Client], int, int, bool]] = {  # make, clients, steps, images
    "MLP 15-64-64-20, batch 10": (_plain(lambda: mlp(15, 64, 64, 20), (15,), 160, 10, 2), 100, 32, False),
    "MLP 784-512-256-64-10, batch 10": (_plain(_mlp784, (784,), 200, 10), 20, 20, False),
    "CNN 16-32, 28 x 28, batch 50": (_plain(lambda: cnn(28, 1, 16, 32), (1, 28, 28), 250, 50), 20, 5, True),
    "CNN 16-32-64, 32 x 32 x 3, batch 50": (_plain(_cnn32, (3, 32, 32), 250, 50), 10, 5, True),
    "FedRep, MLP 15-64-64-20, batch 10": (_fedrep, 10, 176, False),
    "FLIC pre-training, 15-64-64-64, batch 10": (_flic(160, 10, 5, local=False), 20, 80, False),
    "FLIC local step, 15-64-64-64, batch 100": (_flic(400, 100, 10, local=True), 20, 40, False),
}  # fmt: skip


def main() -> None:
    _self_check()
    torch.manual_seed(0)
    print(f"{'workload (fused Adam)':42}us per step  threads  layout         load")
    for name, (make, clients, steps, images) in ROWS.items():
        us, threads, last = measure(make, clients=clients, steps=steps, images=images)
        layout = "channels_last" if last else "contiguous"
        print(f"{name:42}{us:11.0f}{threads:9}  {layout:13}{os.getloadavg()[0]:6.1f}", flush=True)


if __name__ == "__main__":
    usage(__doc__)
    main()
