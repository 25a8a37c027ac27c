"""Callbacks that come with perfed, one file each."""

from __future__ import annotations

from perfed.run.callback import Callback
from perfed.run.callbacks.best import BestModels
from perfed.run.callbacks.losses import LocalLosses
from perfed.run.callbacks.snapshots import EmbeddedSamples
from perfed.run.callbacks.targets import Targets
from perfed.run.settings import Evaluation, Snapshots


def asked_for(evaluation: Evaluation, snapshots: Snapshots) -> list[Callback]:
    """Return the callbacks that a run's settings ask for, in their order."""
    found: list[Callback] = []
    if evaluation.stop == "validated":
        found.append(BestModels())
    if snapshots.losses:
        found.append(LocalLosses())
    if snapshots.rounds:
        found.append(EmbeddedSamples(wanted=snapshots))
    if evaluation.targets:
        found.append(Targets(targets=evaluation.targets, stop=evaluation.stop == "targets"))
    return found
