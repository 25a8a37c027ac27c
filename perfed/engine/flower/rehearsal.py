"""What a reply must be like: the program's own reply for a client that is made up, with the facts of a real one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from perfed.codec import flatten
from perfed.data.client import Client, Split
from perfed.engine.executor import Background, ChunkTask, LocalExecutor
from perfed.engine.flower.checks import Entry, like
from perfed.engine.flower.wire import LOSS, reply_tree
from perfed.engine.initial import Initialiser
from perfed.rng import key, uniform
from perfed.training.plan import Plan

_EACH = 2  # samples of each class


def rehearsed(work: ChunkTask, client: Client, background: Background, initialiser: Initialiser) -> dict[str, Entry]:
    """Names, shapes and dtypes of what the site ``client`` replies to ``work``, which is done for a made-up client.

    Shapes of replies depend on classes, domains and shapes of inputs, never on the number of samples. An entry that is
    not finite for the made-up client need not be so for the real one.

    Args:
        work: that the site is asked to do, with its payload.
        client: of whom facts are known.
        background: of the federation.
        initialiser: method, model, seed.
    """
    host = LocalExecutor(
        [made_up(client, background, initialiser)], background, initialiser, Plan("sequential", threads=1)
    )
    done = host.run(replace(work, exchange=replace(work.exchange, measure=None), states={}))
    reply = reply_tree(done)
    rows = len(host.clients[client.id].train)
    finite = {name: bool(torch.isfinite(value).all()) for name, value in flatten(reply).items()}
    finite[LOSS] = False  # there is none where nothing was trained
    counts = {name: _counts(name, value, rows) for name, value in flatten(reply).items()}
    return {name: entry._replace(finite=finite[name], counts=counts[name]) for name, entry in like(reply).items()}


def _counts(name: str, value: Tensor, rows: int) -> bool:
    """Whether an entry holds numbers of samples: it is called so, and of a client with ``rows`` samples it does."""
    called = name.rpartition("/")[2].endswith(("num_samples", "counts"))
    return called and value.numel() > 0 and bool(((value >= 0) & (value <= rows)).all())


def made_up(client: Client, background: Background, initialiser: Initialiser) -> Client:
    """A client with the facts of ``client``, but two samples of each class (or four), whose inputs are 0 and 1."""
    info, train = background.info, client.train
    labels = [label for label, count in enumerate(train.held_classes) if count]
    count = _EACH * (len(labels) or 2)
    keys = key(initialiser.seed, "made up", torch.arange(count))
    size = max(1, int(torch.tensor(train.input_shape).prod()))
    x = uniform(keys, size).round().view(count, *train.input_shape).to(initialiser.dtype)
    drawn = uniform(keys, max(1, int(torch.tensor(train.target_shape).prod())), initialiser.dtype)
    y = drawn.view(count, *train.target_shape) + 0.5
    if info.task == "classification":
        y = torch.tensor(labels).repeat(_EACH)
    elif info.task == "survival":
        y[:, 1] = torch.arange(count) % 2
    domain = torch.arange(count) % info.num_domains if info.num_domains else None
    return Client(client.id, Split(x, y, domain))
