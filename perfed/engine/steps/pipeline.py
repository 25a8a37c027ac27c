"""Selection of the steps of a run's exchanges."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from perfed.data.client import Client
from perfed.engine.evaluate import Metrics, Outputs
from perfed.engine.initial import Initialiser
from perfed.engine.record import RoundRecord
from perfed.engine.steps.byte_counter import ByteCounter
from perfed.engine.steps.extensions import ExtensionPayloads, ExtensionReplies
from perfed.engine.steps.loss_curves import LossCurves
from perfed.engine.steps.named_columns import NamedColumns
from perfed.engine.steps.scores import ModelOutputs, ModelScores
from perfed.engine.steps.step import ExchangeStep
from perfed.method.exchange import Replies, ServerState
from perfed.method.extension import Extension
from perfed.method.method import Method


def make_run_steps(
    initialiser: Initialiser, clients: Mapping[str, Client], make_sums: Callable[[], ExchangeStep]
) -> list[ExchangeStep]:
    """Return the steps that exist for a whole run and change its replies; the divergence check comes after them.

    Args:
        initialiser: the method, the model and the settings of secure aggregation.
        clients: all clients by id.
        make_sums: creates the step of secure aggregation.
    """
    steps: list[ExchangeStep] = []
    if initialiser.secure is not None:
        steps.append(make_sums())
    if any(client.held is not None for client in clients.values()):
        steps.append(NamedColumns(initialiser, clients))
    return steps


def make_score_steps(split: str, metrics: Metrics, outputs: list[Outputs] | None) -> list[ExchangeStep]:
    """Return the steps that score the clients' models.

    Args:
        split: the split on which clients score their models.
        metrics: receives the metrics of each client.
        outputs: receives the predictions for every sample; ``None`` if they are not needed.
    """
    steps: list[ExchangeStep] = [ModelScores(split, metrics)]
    if outputs is not None:
        steps.append(ModelOutputs(outputs))
    return steps


def make_round_steps(
    method: Method,
    state: ServerState,
    record: RoundRecord,
    extension_replies: list[Replies],
    initialiser: Initialiser,
    *,
    invited: int,
    split: str | None = None,
    keep_outputs: bool = False,
) -> list[ExchangeStep]:
    """Return the steps of one round, the one nearest to the server first; those of the run come after them.

    Args:
        method: the method with the numbers of the round.
        state: the server's parameter sets, which the round changes.
        record: the record of the round, which the steps complete.
        extension_replies: receives the replies of exchanges in which extensions added to them.
        initialiser: the settings of secure aggregation, and the clients whose losses are recorded.
        invited: the number of clients that receive the first exchange.
        split: the split on which clients score their models right after local training; ``None`` for no scores.
        keep_outputs: whether the predictions of these models are stored in the record.
    """
    steps: list[ExchangeStep] = []
    if initialiser.watched:
        steps.append(LossCurves(record.loss_curves))
    if split is not None:
        steps += make_score_steps(split, record.after, record.outputs if keep_outputs else None)
    if method.extensions:
        steps.append(ExtensionPayloads(method.extensions, state, extension_replies))
    if initialiser.secure is None and any(_has_incoming(extension) for extension in method.extensions):
        steps.append(ExtensionReplies(method.extensions, state))
    return [*steps, ByteCounter(record, invited)]


def _has_incoming(extension: Extension) -> bool:
    """Return whether an extension changes replies on the server."""
    return type(extension).incoming is not Extension.incoming
