"""Evaluation of the personal models of clients: on which data and when, and summaries over clients."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from typing import Any

from perfed.data.federation import Federation
from perfed.data.held_out import split_validation
from perfed.engine.evaluate import (
    Metrics,
    Outputs,
    compute_domain_metrics,
    few_samples,
    sample_counts,
    summarise,
    untrained_domains,
    with_extremes,
)
from perfed.engine.gap import GAP, generalisation_gaps
from perfed.engine.metrics import Scoring, find_metric
from perfed.engine.record import RoundRecord
from perfed.engine.server import Server
from perfed.errors import PerfedError
from perfed.method.method import Method
from perfed.run import predictions
from perfed.run.callbacks.best import BestModels
from perfed.run.settings import Evaluation
from perfed.run.totals import RunTotals


def choose_scored_split(
    method: Method, federation: Federation, split: str, name: str, seed: int
) -> tuple[Federation, str, list[str]]:
    """Return the clients' data that the method may use, the split that is evaluated, and notes.

    A method that uses validation data is not evaluated on the same samples.

    Args:
        method: method of the run.
        federation: the clients.
        split: the split to be evaluated.
        name: name of the method in the notes.
        seed: seed of the run.
    """
    if not method.uses_validation:
        return federation, split, []
    notes = []
    if split == "validation":
        federation, split = split_validation(federation, seed), "test"
        notes.append(f"half of the validation samples are {name}'s own; the scores are on the others")
    lacking = sum(client.split("validation") is None for client in federation)
    if lacking:
        notes.append(
            f"{lacking} of {len(federation)} clients have no validation data for {name}, which uses their "
            "training data in place of them (data.validation_fraction)"
        )
    return federation, split, notes


def build_scoring(settings: Evaluation, federation: Federation, training: Federation) -> Scoring:
    """Return the metrics that are computed for each client's personal model.

    Args:
        settings: settings of the evaluation.
        federation: the clients.
        training: the same clients with the data on which they train.

    Raises:
        PerfedError: if a metric does not fit the task, or ``classes`` is used without classes.
    """
    names = []
    for requested_name in settings.requested_metrics:
        name, metric = find_metric(requested_name)
        if metric.task not in (None, federation.task):
            key = "metrics" if requested_name in settings.metrics else "compare_by"
            raise PerfedError(
                f"evaluation.{key}: '{requested_name}' is for {metric.task}, but {_describe_task(federation)}"
            )
        if not metric.of_model:
            names.append(name)
    only_held = settings.classes == "held"
    if only_held and federation.num_classes is None:
        raise PerfedError(f"evaluation.classes = 'held' is for classification, but {_describe_task(federation)}")
    lacking = only_held and any(0 in client.train.class_counts(federation.num_classes or 0) for client in training)
    return Scoring(tuple(names), lacking, federation.target_scale)


def _describe_task(federation: Federation) -> str:
    return f"data set '{federation.name}' is {'for ' if federation.survival else 'a '}{federation.task}"


class Evaluator:
    """A class that evaluates the personal models of clients after rounds.

    Args:
        settings: which metrics are reported, and when.
        server: server of the run.
        federation: the clients with the data on which they are evaluated.
        split: the evaluated split, from :func:`choose_scored_split`.
        rounds: number of rounds of the run.

    Attributes:
        untrained: names of the domains in the split on which no client trains, if the method has parameters per domain.
        domain_samples: number of samples of each domain in the split.

    Raises:
        PerfedError: if no client has data in the split, or requested metrics do not fit the task.
    """

    def __init__(self, settings: Evaluation, server: Server, federation: Federation, split: str, rounds: int) -> None:
        self.settings = settings
        self.federation = federation
        self.split = split
        self.rounds = rounds
        self.untrained = untrained_domains(federation, split) if server.per_domain else []
        self._server = server
        if all(client.split(split) is None for client in federation):
            raise PerfedError(f"evaluation.split = '{settings.split}': no client has such data")
        if settings.stop == "validated" and all(client.split("validation") is None for client in federation):
            raise PerfedError("evaluation.stop = 'validated': no client has validation data (data.validation_fraction)")
        if settings.targets and federation.num_classes is None:
            raise PerfedError(f"evaluation.targets: are accuracies, but {_describe_task(federation)}")
        self.domain_samples = federation.domain_samples(split)
        names = [find_metric(name)[0] for name in settings.metrics]
        self._gap = GAP in names
        if self._gap and (settings.when, settings.stop) != ("before", "last"):
            raise PerfedError(f"evaluation.metrics: '{GAP}' needs the models of rounds: when = 'before', stop = 'last'")
        self.scoring = build_scoring(settings, federation, server.federation)
        if self._gap and server.linear_head is None:
            raise PerfedError(f"evaluation.metrics: '{GAP}' is for methods that predict with one linear head")
        self._too_many = predictions.exceeds_limit(federation, split, settings.last)
        server.measure(self.scoring)

    def notes(self) -> list[str]:
        """Return notes on the metrics for the summary."""
        notes = [predictions.NOT_SAVED_NOTE] if self._too_many else []
        if self.federation.num_domains and self.settings.when == "after":
            notes.append("no metrics per domain: they are measured before local training (evaluation.when)")
        if self.untrained:
            notes.append(
                f"domains that nobody trains on, only in {self.settings.split} data: {', '.join(self.untrained)}; "
                "outputs there are the means of those with the other domains' parameters"
            )
        few = few_samples(self.domain_samples)
        if few and self.settings.when == "before":
            names = ", ".join(f"{name} (n = {self.domain_samples[name]})" for name in few)
            has_large_domains = len(few) < len(self.domain_samples)
            which = "without them" if has_large_domains else "over them all the same, as there are no others"
            data = f"fewer than ten {self.settings.split} samples"
            notes.append(f"domains with {data}: {names}; mean, min and max over domains are {which}")
        return notes

    def with_extremes(self, domains: Metrics) -> Metrics:
        """Return metrics by domain with their mean, minimum and maximum over the domains with enough samples."""
        return with_extremes(domains, few_samples(self.domain_samples))

    def is_due(self, number: int) -> bool:
        """Return whether round ``number`` is evaluated."""
        return self.settings.is_due(number, self.rounds)

    def keeps_outputs(self, number: int, when: str) -> bool:
        """Return whether the outputs of a round's models are stored, which are those behind the reported metrics.

        Args:
            number: number of the round.
            when: "before" or "after" local training.
        """
        is_reported = (self.settings.when, self.settings.stop) == (when, "last")
        return is_reported and number > self.rounds - self.settings.last and not self._too_many

    def has_models(self, outcome: RoundRecord) -> bool:
        """Return whether there are models to evaluate; without participants there may be none."""
        return bool(outcome.participants) or (self.settings.who, self.settings.when) == ("all", "before")

    def evaluate_round(self, number: int, outcome: RoundRecord, totals: RunTotals) -> dict[str, Any]:
        """Return the metrics after round ``number`` for ``rounds.jsonl``, and add those of each client to ``totals``.

        Outputs that are stored are added to the arrays of ``outcome``.

        Raises:
            PerfedError: if an output of a client's model is not a number.
        """
        settings, by_domains = self.settings, self.federation.num_domains and self.settings.when == "before"
        # Outputs are those of ``personalise``, before local training.
        outputs: list[Outputs] | None = [] if by_domains or self.keeps_outputs(number, "before") else None
        before = self._evaluate_models(number, outcome, totals, outputs)
        reported, totals.other = (before, outcome.after) if settings.when == "before" else (outcome.after, before)
        metrics, domains = self.summarise_clients(reported), {}
        if self.keeps_outputs(number, settings.when):
            outcome.arrays |= self._outputs_to_arrays(outcome.outputs if outputs is None else outputs)
        domain_metrics: Metrics = {}
        if outputs and by_domains:
            domain_metrics, totals.client_domains = compute_domain_metrics(
                outputs, self.federation, self.scoring.metrics
            )
            domains = {"domains": self.with_extremes(domain_metrics)}
        totals.add_evaluation(reported, domain_metrics, settings.last)
        if settings.when == "before" and outcome.after:
            metrics.update({f"{name}_after": value for name, value in self.summarise_clients(outcome.after).items()})
        return {"metrics": metrics, **({"accuracy": metrics["accuracy"]} if "accuracy" in metrics else {}), **domains}

    def _outputs_to_arrays(self, outputs: list[Outputs]) -> dict[str, dict[str, Any]]:
        """Return outputs as arrays to be stored, by folder; empty without outputs."""
        return {predictions.FOLDER: predictions.build_arrays(outputs, self.federation, self.split)} if outputs else {}

    def _evaluate_models(
        self, number: int, outcome: RoundRecord, totals: RunTotals, outputs: list[Outputs] | None
    ) -> Metrics:
        """Return the metrics of the models with which clients would start their next round."""
        ids = outcome.participants if self.settings.who == "participants" else None
        unused = [] if number == self.rounds else totals.never_used(self.federation.ids)  # at the end they have settled
        metrics = self._server.evaluate(self.split, ids, number, outputs, never_used=unused)
        if self._gap:  # clients that were never used have no model yet
            trained_clients = [i for i in metrics if i not in unused]
            gaps = generalisation_gaps(self._server.own_models(trained_clients, number), str(self._server.linear_head))
            metrics = {i: values | ({GAP: gaps[i]} if i in gaps else {}) for i, values in metrics.items()}
        for client, values in metrics.items():
            if any(isnan(value) for value in values.values()):
                raise PerfedError(
                    f"round {number}: the model of client '{client}' gives values that are not numbers; lower the "
                    "learning rate or look at this client's data"
                )
        return metrics

    def evaluate_best(self, best: BestModels, number: int, totals: RunTotals) -> Mapping[str, Mapping[str, Any]]:
        """Evaluate the final models: each client's ``best``, or that of round ``number``, the last round.

        Returns:
            Their outputs as arrays to be stored.
        """
        by_domains = self.federation.num_domains
        outputs: list[Outputs] | None = [] if by_domains or not self._too_many else None
        metrics: Metrics = {}
        for round_, ids in best.group_clients(self.federation.ids).items():
            with best.restore_best(self._server, ids[0]):
                metrics |= self._server.evaluate(self.split, ids, round_ or number, outputs)
        domains: Metrics = {}
        if outputs and by_domains:
            domains, totals.client_domains = compute_domain_metrics(outputs, self.federation, self.scoring.metrics)
        totals.other = {}
        totals.add_evaluation({client: metrics[client] for client in sorted(metrics)}, domains, 1)
        return self._outputs_to_arrays(outputs) if outputs and not self._too_many else {}

    def summarise_clients(self, metrics: Metrics) -> dict[str, Any]:
        """Return the mean, spread and percentiles of every metric over clients, with the weights of the settings."""
        uniform = self.settings.weights == "uniform"
        return summarise(metrics, None if uniform else sample_counts(self.federation, self.split))
