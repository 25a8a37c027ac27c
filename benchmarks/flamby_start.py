"""FLamby's published runs again from their seeds, and from 30 others: its protocol in plain numpy, not perfed's engine.

``python benchmarks/flamby_start.py`` draws initial models and mini-batches from torch's generator in the order in which
FLamby's programs do (owkin/FLamby@edacf54d), so that each of their seeds has its published figure again. Other seeds
then say how much of a figure is its seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from usage import usage

from perfed.datasets import load
from perfed.engine.scores import c_index

Array = NDArray[Any]
Gradient = Callable[[Array, Array, Array], Array]
STEPS = 100  # of a client's round
OTHERS = range(1000, 1030)
# Their result files: mean over the sites for each of the seeds 42 to 46.
THEIRS = {
    "flamby-tcga: Local": (0.6910, 0.6849, 0.6853, 0.6806, 0.7039),
    "flamby-tcga: Cyclic": (0.6985, 0.6736, 0.6744, 0.5858, 0.6589),
    "flamby-tcga: FedAdagrad": (0.8195, 0.8163, 0.8088, 0.8090, 0.8111),
    "flamby-tcga: FedAdam": (0.8073, 0.7769, 0.8408, 0.8362, 0.8146),
    "flamby-tcga: FedAvg": (0.8117, 0.4081, 0.8148, 0.8203, 0.8047),
    "flamby-heart: FedAvg, lr 0.00316": (0.7110, 0.6986, 0.7105, 0.7368, 0.7319),
    "flamby-heart: FedAvg, lr 0.00316, 100 steps of fine-tuning": (0.7478, 0.7243, 0.7316, 0.7368, 0.7347),
}


@dataclass(frozen=True)
class Site:
    """Inputs, the last of which is 1, and targets."""

    x: Array
    y: Array
    test_x: Array
    test_y: Array


def sites(name: str) -> list[Site]:
    """The regions or hospitals of a data set."""
    found = []
    for client in load(name, {}, seed=0):
        assert client.test is not None
        x, test_x = (np.append(part.x.numpy(), np.ones((len(part), 1)), 1) for part in (client.train, client.test))
        found.append(Site(x, client.train.y.numpy(), test_x, client.test.y.numpy()))
    return found


def initial(data: Sequence[Site]) -> Array:
    """The weights, then the bias, of a linear layer that torch draws."""
    layer = torch.nn.Linear(data[0].x.shape[1] - 1, 1)
    return np.append(layer.weight.detach().numpy(), layer.bias.item()).astype(np.float64)


def shuffled(y: Array, size: int) -> DataLoader[Any]:
    """Rows of mini-batches; a shuffle whenever it is gone through."""
    rows: Any = range(len(y))
    return DataLoader(rows, batch_size=size, shuffle=True, collate_fn=np.array)


def endless(loader: DataLoader[Any], ahead: bool) -> Iterator[Any]:
    """Mini-batches, shuffle after shuffle; the first one ``ahead``, as workers do, or when it is asked for."""
    first = iter(loader)
    ready = [next(first)] if ahead else []
    return itertools.chain.from_iterable(itertools.chain([ready, first], itertools.repeat(loader)))


def cox(w: Array, x: Array, y: Array) -> Array:
    """Gradient of the Cox loss of a mini-batch, the mean over its samples; ties in the order of the mini-batch."""
    order = np.argsort(-y[:, 0], kind="stable")
    x, event = x[order], y[order, 1]
    h = x @ w
    risk = np.exp(h - h.max())
    mean = (risk[:, None] * x).cumsum(0) / np.maximum(risk.cumsum(), 1e-300)[:, None]
    return np.asarray(((mean - x) * event[:, None]).sum(0) / len(x))


def logistic(w: Array, x: Array, y: Array) -> Array:
    """Gradient of the mean cross-entropy of a mini-batch."""
    return np.asarray(x.T @ (1 / (1 + np.exp(-x @ w)) - y) / len(x))


def steps(w: Array, site: Site, batches: Iterable[Any], rate: float, gradient: Gradient) -> Array:
    """SGD."""
    for rows in itertools.islice(batches, STEPS):
        w = w - rate * gradient(w, site.x[rows], site.y[rows])
    return w


def adam(w: Array, site: Site, epochs: int, rate: float, gradient: Gradient, size: int) -> Array:
    """Adam as torch has it."""
    m, v, loader = np.zeros_like(w), np.zeros_like(w), shuffled(site.y, size)
    for t, rows in enumerate(itertools.chain.from_iterable(itertools.repeat(loader, epochs)), 1):
        g = gradient(w, site.x[rows], site.y[rows])
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        w = w - rate * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return w


def rounds(
    w: Array,
    data: Sequence[Site],
    streams: Sequence[Iterator[Any]],
    count: int,
    rate: float,
    gradient: Gradient,
    server: str = "",
    server_rate: float = 1.0,
) -> Array:
    """Rounds of FedAvg, or with a server's Adam or Adagrad without correction of bias."""
    sizes = np.array([len(site.x) for site in data], np.float64)
    m, v = np.zeros_like(w), np.zeros_like(w)
    for _ in range(count):
        changes = [steps(w, site, of, rate, gradient) - w for site, of in zip(data, streams, strict=True)]
        change = sizes @ np.array(changes) / sizes.sum()
        m = 0.9 * m + 0.1 * change
        v = 0.999 * v + 0.001 * change**2 if server == "adam" else v + change**2
        w = w + (server_rate * m / (np.sqrt(v) + 1e-8) if server else change)
    return w


def tcga(data: Sequence[Site], seed: int) -> dict[str, float]:
    """Means of the regions' C-indices after methods of FLamby's benchmark with a seed, in its order.

    The seed is set anew for each method, after its loaders, which have workers, have drawn their first shuffles: those
    hang on the method before.
    """

    def evaluated(models: Sequence[Array]) -> float:
        torch.empty(len(data) + 1, dtype=torch.int64).random_()  # a loader draws a number whenever it is gone through
        pairs = zip(models, data, strict=True)
        return float(np.mean([c_index(site.test_y, (site.test_x @ model)[:, None]) for model, site in pairs]))

    torch.manual_seed(seed)
    start = initial(data)
    models = []
    for site in data:
        torch.manual_seed(seed)
        models.append(adam(start, site, 30, 0.1, cox, 8))
    found = {"Local": evaluated(models)}
    methods = {"FedAdagrad": (0.01, "adagrad", 1.0), "FedAdam": (0.01, "adam", 0.1), "FedAvg": (0.1, "", 1.0)}
    for name in ("Cyclic", *methods):
        streams = [endless(shuffled(site.y, 8), ahead=True) for site in data]
        torch.manual_seed(seed)
        if name == "Cyclic":  # a client a round, each with a copy of its own; the first one's is evaluated
            turns = np.random.default_rng(seed).permutation(len(data))[:5].tolist()
            copies = {turn: steps(start, data[turn], streams[turn], 0.01, cox) for turn in turns}
            model = copies.get(0, start)
        else:
            rate, server, server_rate = methods[name]
            model = rounds(start, data, streams, 5, rate, cox, server, server_rate)
        found[name] = evaluated([model] * len(data))
    return {f"flamby-tcga: {name}": figure for name, figure in found.items()}


def heart(data: Sequence[Site], seed: int) -> dict[str, float]:
    """Means of the hospitals' accuracies after the two methods of FLamby's example of personalisation with a seed.

    Its initial model is drawn before the seed is set, from where the run before it, with another seed, has left torch's
    generator; and what it evaluates is shuffled as well.
    """
    start = initial(data)
    torch.manual_seed(seed)
    loaders, tests = [shuffled(site.y, 4) for site in data], [shuffled(site.test_y, 4) for site in data]
    found = {}
    for name, fine_tuned in (("", False), (", 100 steps of fine-tuning", True)):
        streams = [endless(loader, ahead=False) for loader in loaders]
        model = rounds(start, data, streams, 15, 0.00316227, logistic)
        models = [model] * len(data)
        if fine_tuned:
            models = [steps(model, site, of, 0.00316227, logistic) for site, of in zip(data, streams, strict=True)]
        for test in tests * (len(tests) if fine_tuned else 1):  # every model on every hospital
            list(test)
        right = [((site.test_x @ w > 0) == site.test_y).mean() for w, site in zip(models, data, strict=True)]
        found[f"flamby-heart: FedAvg, lr 0.00316{name}"] = float(np.mean(right))
    return found


def main() -> None:
    """Print the figures of each of their seeds beside theirs, then means and deviations over other seeds."""
    for run, name in ((tcga, "flamby-tcga"), (heart, "flamby-heart")):
        data = sites(name)
        ours, others = ([run(data, seed) for seed in seeds] for seeds in (range(42, 47), OTHERS))
        for method in ours[0]:
            print(method)
            figures = {"published": THEIRS[method], "from their seeds": [found[method] for found in ours]}
            for what, values in (figures | {"from 30 others": [found[method] for found in others]}).items():
                each = " ".join(f"{value:.4f}" for value in values) if what in figures else ""
                print(f"  {what}: {np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}  {each}".rstrip(), flush=True)


if __name__ == "__main__":
    usage(__doc__)
    main()
