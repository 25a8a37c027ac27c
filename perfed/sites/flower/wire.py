"""The conversion of tasks and results to messages, which defines all fields that go over the network."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from math import inf
from sys import float_info
from typing import Any

import torch
from torch import Tensor

from perfed.codec import encode
from perfed.data.target_scale import TargetScale
from perfed.engine.evaluate import Metrics
from perfed.engine.executor import Background, ChunkResult, ChunkTask, Exchange
from perfed.engine.metrics import METRICS, Scoring
from perfed.sites.flower.message import pack
from perfed.tree import Tree

ROUND = 10_000
"""The exchanges of a round have the numbers from ``ROUND`` times the number of the round."""


_ROUNDING = 1e-6
"""The amount by which a metric may be outside its range, because some metrics are sums of rounded numbers."""

LOSS, REPLY = "loss", "reply/"
"""The entry of the mean training loss, and the beginning of the names of the entries of the program's reply."""
MEASURED = "metrics"
"""The entry with noisy metrics, by name, in a reply that is part of a sum."""
MASKED, SUM = "masked", "sum"
"""The entry of a masked reply, and the field of its header with the id of the attempt at the sum."""


def get_sequence_number(exchange: Exchange) -> int:
    """Return the number of an exchange; it is the same when the exchange is repeated after a crash.

    The number 0 stands for the initial state. All exchanges on copies of the models in a round share the last number of
    the round, which no stored state has.
    """
    return exchange.round * ROUND + (1 + exchange.index if exchange.lasting else ROUND - 1)


def pack_task(
    work: ChunkTask,
    run: str,
    sequence: int,
    base: int,
    keep: Collection[int],
    background: Background,
    secure: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the message that asks a site to do a task.

    Args:
        work: The task, with a single client.
        run: The id of the run.
        sequence: The number of the exchange.
        base: The number of the exchange whose state the site starts from; 0 for its initial state.
        keep: The numbers of other exchanges whose states the site must keep.
        background: The facts about the federation that the site needs for the task.
        secure: The fields of the secure sum of which the reply is a part; ``None`` for a reply without masks.
    """
    (site,) = work.ids
    info = background.info
    header = {
        "kind": "work",
        "run": run,
        "sequence": sequence,
        "base": base,
        "keep": sorted(keep),
        **asdict(work.exchange),
        "scoring": {"metrics": list(work.scoring.metrics), "held": work.scoring.held},
        "clients": len(info.ids),
        "domains": info.num_domains,
        "trained": list(background.trained),
        **({} if secure is None else {"secure": dict(secure)}),
    }
    return pack(header, {"shared": work.shared, "row": work.rows.get(site, {})})


def hash_common_request(header: Mapping[str, Any], tree: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the part of a task message that is the same for all sites: header and shared payload.

    The parts that may differ between sites are left out: the state that a site starts from, and its own entries.
    """
    common = {name: value for name, value in header.items() if name not in ("base", "keep", "secure")}
    return _hash_parts(json.dumps(common, sort_keys=True).encode(), encode(tree["shared"]))


def hash_payload(header: Mapping[str, Any], tree: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the program and the shared payload of a task message."""
    return _hash_parts(header["program"].encode(), encode(tree["shared"]))


def _hash_parts(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def exchange_from_header(header: Mapping[str, Any]) -> Exchange:
    """Return the exchange of a task message from its header."""
    return Exchange(*(header[name] for name in ("program", "round", "index", "measure", "extensions")))


def unpack_task(
    header: Mapping[str, Any], tree: Mapping[str, Any], site: str, state: Tree | None, scale: TargetScale | None
) -> ChunkTask:
    """Return the task of a message; the inverse of :func:`pack_task`.

    Args:
        header, tree: The header and the tree of the message.
        site: The name of the site that works on the task.
        state: The state that the site starts from; ``None`` for the initial state.
        scale: The scale by which targets were standardised.
    """
    exchange = exchange_from_header(header)
    scoring = Scoring(tuple(header["scoring"]["metrics"]), header["scoring"]["held"], scale)
    states = {} if state is None else {site: state}
    return ChunkTask(exchange, (site,), tree["shared"], {site: tree["row"]}, states, scoring, keep_outputs=False)


def pack_result(result: ChunkResult, header: Mapping[str, Any]) -> bytes:
    """Return the reply of a site to the message with ``header``, which contains no state of the client."""
    return pack(make_reply_header(result, header), make_reply_tree(result))


def make_reply_header(result: ChunkResult, header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header of the reply to the message with ``header``."""
    (site,) = result.ids
    fields = {name: header[name] for name in ("run", "sequence", "program", "round", "asked")}
    return {"kind": "done", "site": site, **fields, "metrics": result.metrics.get(site)}


def make_reply_tree(result: ChunkResult) -> dict[str, Any]:
    """Return the tensors of a reply: those of the program's reply, and the mean training loss."""
    return {"reply": result.reply(0), LOSS: result.losses[0].double()}


def unpack_result(header: Mapping[str, Any], tree: Mapping[str, Any]) -> ChunkResult:
    """Return the result in a reply, whose state is the number of the exchange; the inverse of :func:`pack_result`."""
    site, metrics = header["site"], header["metrics"]
    content = {name: [value] for name, value in tree["reply"].items()}
    state = {"sequence": torch.tensor(header["sequence"])}
    return ChunkResult(
        (site,), content, ({},), tree[LOSS][None], {} if metrics is None else {site: metrics}, [], {site: state}
    )


def unpack_masked_result(
    header: Mapping[str, Any], tree: Mapping[str, Any], sequence: int, loss: Tensor, pooled: Metrics | None = None
) -> ChunkResult:
    """Return the result of a site whose reply is masked, so that the server knows only the sum over sites.

    Args:
        header, tree: The header and the tree of the masked reply.
        sequence: The number of the exchange.
        loss: The mean training loss of all sites, of shape ``(1,)``.
        pooled: The mean metrics of a group of sites; ``None`` if each site replies with its own metrics.
    """
    site, metrics = header["site"], header["metrics"]
    state = {"sequence": torch.tensor(sequence)}
    content = {MASKED: [tree[MASKED]]}
    known_metrics = pooled or ({} if metrics is None else {site: metrics})
    return ChunkResult((site,), content, ({},), loss, known_metrics, [], {site: state})


def find_metrics_problem(header: Mapping[str, Any], noisy: bool = False) -> str:
    """Return what is wrong with the metrics of a reply; an empty text if they are valid.

    Args:
        header: The header of the reply.
        noisy: Whether the metrics have noise, so that they may be outside their range.
    """
    where = f"the reply of site '{header['site']}'"
    if "metrics" not in header:
        return f"{where}: metrics is missing from the header"
    metrics = header["metrics"]
    if metrics is None:
        return ""
    if (
        not isinstance(metrics, dict)
        or len(metrics) >= 1000
        or any(type(value) not in (int, float) for value in metrics.values())
    ):
        return f"{where}: metrics must be a table of numbers by name"
    for name, value in metrics.items():
        metric = METRICS.get(name.removesuffix("_all"))
        if metric is None:
            return f"{where}: metric {name!r:.60} does not exist"
        low, high = (-float_info.max, float_info.max) if noisy else metric.span
        if (
            not low - _ROUNDING <= value <= high + _ROUNDING or float_info.max < abs(value) < inf
        ):  # an integer that no float can represent
            return f"{where}: metric '{name}' is {value!r:.40}; a number from {low:g} to {high:g} is needed"
    return ""
