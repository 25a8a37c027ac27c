"""ChunkTask and what was done as messages: the one place that says which words go over the network."""

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
"""Exchanges of one round have the numbers from ROUND times the round on."""


_ROUNDING = 1e-6
"""What a metric may be out of its range: some are sums of rounded numbers."""

LOSS, REPLY = "loss", "reply/"
"""Entry of the mean training loss, beside those of the program's reply, which begin like this."""
MEASURED = "metrics"
"""Entry of a reply that goes into a sum: metrics with noise, by name."""
MASKED, SUM = "masked", "sum"
"""Entry of a reply under masks, and the field of its header that says in which attempt at a sum."""


def get_sequence_number(exchange: Exchange) -> int:
    """The number of an exchange; one that is done again after a crash has the same.

    0 is the initial state. Exchanges on copies have one number in a round, the last: no state is called so.
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
    """What one site is asked to do.

    Args:
        work: of one client.
        run: id of the run.
        sequence: number of the exchange.
        base: number of the exchange whose state the site starts from; 0: its initial values.
        keep: numbers of other exchanges whose states the site must not forget.
        background: of the federation, for the site's host.
        secure: of the sum that the reply goes into, where it leaves under masks.
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
    """Return the SHA-256 of what a message of work asks of all sites alike: its header and the shared payload.

    What may differ between sites is left out: the state that each starts from, and entries that only one of them gets.
    """
    common = {name: value for name, value in header.items() if name not in ("base", "keep", "secure")}
    return _hash(json.dumps(common, sort_keys=True).encode(), encode(tree["shared"]))


def hash_payload(header: Mapping[str, Any], tree: Mapping[str, Any]) -> str:
    """Return the SHA-256 of program and shared payload: a site's replies to two messages with one hash are alike."""
    return _hash(header["program"].encode(), encode(tree["shared"]))


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def exchange_from_header(header: Mapping[str, Any]) -> Exchange:
    """Which exchange a message of work is of, by its header."""
    return Exchange(*(header[name] for name in ("program", "round", "index", "measure", "extensions")))


def unpack_task(
    header: Mapping[str, Any], tree: Mapping[str, Any], site: str, state: Tree | None, scale: TargetScale | None
) -> ChunkTask:
    """The inverse of :func:`pack_task` at ``site``, whose state is ``state``."""
    exchange = exchange_from_header(header)
    scoring = Scoring(tuple(header["scoring"]["metrics"]), header["scoring"]["held"], scale)
    states = {} if state is None else {site: state}
    return ChunkTask(exchange, (site,), tree["shared"], {site: tree["row"]}, states, scoring, keep_outputs=False)


def pack_result(done: ChunkResult, header: Mapping[str, Any]) -> bytes:
    """What a site replies to the message with ``header``: no model of its own, no word on single samples."""
    return pack(make_reply_header(done, header), make_reply_tree(done))


def make_reply_header(done: ChunkResult, header: Mapping[str, Any]) -> dict[str, Any]:
    """What a reply to the message with ``header`` says beside its tensors."""
    (site,) = done.ids
    fields = {name: header[name] for name in ("run", "sequence", "program", "round", "asked")}
    return {"kind": "done", "site": site, **fields, "metrics": done.metrics.get(site)}


def make_reply_tree(done: ChunkResult) -> dict[str, Any]:
    """What a reply holds: the program's, and the mean training loss."""
    return {"reply": done.reply(0), LOSS: done.losses[0].double()}


def unpack_result(header: Mapping[str, Any], tree: Mapping[str, Any]) -> ChunkResult:
    """The inverse of :func:`pack_result`; in the place of the site's new state is the number of the exchange."""
    site, measured = header["site"], header["metrics"]
    content = {name: [value] for name, value in tree["reply"].items()}
    state = {"sequence": torch.tensor(header["sequence"])}
    return ChunkResult(
        (site,), content, ({},), tree[LOSS][None], {} if measured is None else {site: measured}, [], {site: state}
    )


def unpack_masked_result(
    header: Mapping[str, Any], tree: Mapping[str, Any], sequence: int, loss: Tensor, pooled: Metrics | None = None
) -> ChunkResult:
    """What was done at a site whose reply is known in a sum alone.

    Args:
        header, tree: of the reply.
        sequence: of the exchange.
        loss: ``(1,)``, the mean of all.
        pooled: the metrics of a group of sites, of which the mean alone is known.
    """
    site, measured = header["site"], header["metrics"]
    state = {"sequence": torch.tensor(sequence)}
    content = {MASKED: [tree[MASKED]]}
    metrics = pooled or ({} if measured is None else {site: measured})
    return ChunkResult((site,), content, ({},), loss, metrics, [], {site: state})


def find_metrics_problem(header: Mapping[str, Any], noisy: bool = False) -> str:
    """What is wrong with the metrics of a reply; empty if nothing is. ``noisy``: they may be out of their range."""
    where = f"the reply of site '{header['site']}'"
    if "metrics" not in header:
        return f"{where}: metrics is missing from the header"
    found = header["metrics"]
    if found is None:
        return ""
    if not isinstance(found, dict) or len(found) >= 1000 or any(type(v) not in (int, float) for v in found.values()):
        return f"{where}: metrics are names with numbers"
    for name, value in found.items():
        known = METRICS.get(name.removesuffix("_all"))
        if known is None:
            return f"{where}: metric {name!r:.60}, which nobody knows"
        low, high = (-float_info.max, float_info.max) if noisy else known.span
        if not low - _ROUNDING <= value <= high + _ROUNDING or float_info.max < abs(value) < inf:  # a whole number
            return f"{where}: metric '{name}' is {value!r:.40}; a number from {low:g} to {high:g} is needed"
    return ""
