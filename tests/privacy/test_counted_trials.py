"""Trials that choose a number of threads release nothing, and count nothing."""

from __future__ import annotations

import torch
from engines import blobs, network_for, quick

from perfed.engine.executor import Background, ChunkTask, Exchange, LocalExecutor
from perfed.engine.initial import Initialiser
from perfed.engine.metrics import Scoring
from perfed.methods.fedavg import FedAvg
from perfed.privacy.sample import SamplePrivacy
from perfed.training.plan import Plan
from perfed.training.private import ReleaseCounter


def test_trials_of_numbers_of_threads_are_not_counted_as_releases():
    federation = blobs((25,), dims=(4,))
    extension = SamplePrivacy(noise=1.0, entries=("shared", "num_samples"))
    method = quick(FedAvg, extensions=(extension,), batch_size=10, local_epochs=2)
    initialiser = Initialiser(method, network_for(method, federation.num_classes or 1), 0, torch.float64)
    federation = federation.to(dtype=torch.float64, device="cpu")
    info = initialiser.info(federation)
    plan = Plan("sequential", threads=4, untimed_threads=1, remember=False)
    executor = LocalExecutor(federation, Background.from_federation(federation, info), initialiser, plan)
    executor.counter = ReleaseCounter()
    payload = {"shared": initialiser.server_state(federation).shared}
    executor.run(ChunkTask(Exchange("train", 1, 0), federation.ids, payload, {}, {}, Scoring(), keep_outputs=False))
    assert plan.paths  # a trial has chosen
    assert executor.counter.releases == 2
