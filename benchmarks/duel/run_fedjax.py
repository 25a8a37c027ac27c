"""FedJAX's side of the duel: FedAvg (``pip install fedjax``, where an old enough jax installs)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
import problem as duel
from fedjax.algorithms.fed_avg import federated_averaging
from fedjax.core import client_datasets, optimizers


def logits(params: dict[str, jax.Array], x: jax.Array, model: str) -> jax.Array:
    """Return the logits of the same network from torch's weights."""
    if model == "cnn":
        for name in ("body.0", "body.3"):
            x = jax.lax.conv_general_dilated(x, params[f"{name}.weight"], (1, 1), "VALID")
            x = jax.nn.relu(x + params[f"{name}.bias"][:, None, None])
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
        x, layers = x.reshape(len(x), -1), ["body.7"]
    else:
        layers = [f"body.{2 * i}" for i in range(3 if model == "mlp-large" else 2)]
    for name in layers:
        x = jax.nn.relu(x @ params[f"{name}.weight"].T + params[f"{name}.bias"])
    return x @ params["head.weight"].T + params["head.bias"]


def run(folder: Path) -> dict[str, Any]:
    """Train and return the clock's result."""
    problem, train, test, weights = duel.read(folder)
    params = {k: jnp.asarray(v.numpy()) for k, v in weights.items()}

    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array], rng: Any) -> jax.Array:
        out = jax.nn.log_softmax(logits(params, batch["x"], problem.model))
        return -jnp.take_along_axis(out, batch["y"][:, None], 1).mean()

    batches = client_datasets.ShuffleRepeatBatchHParams(problem.batch, num_epochs=1, drop_remainder=False)
    algorithm = federated_averaging(jax.grad(loss), optimizers.sgd(problem.rate), optimizers.sgd(1.0), batches)
    clients = [(str(i), fedjax.ClientDataset({"x": x, "y": y})) for i, (x, y) in enumerate(train)]
    state = algorithm.init(params)
    clock = duel.Clock()
    for round_ in range(problem.rounds):
        keys = jax.random.split(jax.random.PRNGKey(1000 * problem.seed + round_), len(clients))
        state, _ = algorithm.apply(state, [(*client, key) for client, key in zip(clients, keys, strict=True)])
        jax.block_until_ready(state.params)
        clock.lap()
    right = [np.asarray(logits(state.params, jnp.asarray(x), problem.model)).argmax(1) == y for x, y in test]
    return clock.result(float(np.mean([one.mean() for one in right])))


if __name__ == "__main__":
    duel.main(run)
