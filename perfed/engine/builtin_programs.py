"""Client programs that belong to no method: what the engine itself asks of every client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from perfed.method.exchange import Reply
from perfed.method.extension import BoundExtensions
from perfed.method.method import Method
from perfed.model.chain import Parameters
from perfed.training.cohort import Cohort
from perfed.training.step import Step
from perfed.training.steprules import CustomStep, Gradient


def gradient(method: Method, cohort: Cohort, shared: dict[str, Any]) -> Reply:
    """Gradient of each client's mean training loss in the shared parameters, at the received ones, for policies.

    Without extensions, in one mini-batch of all samples; dropout is drawn as in training.
    """
    cohort.load(shared)
    names = cohort.shared_parameters
    found = {name: torch.zeros_like(cohort.model[name]) for name in names}

    def note(params: Parameters, gradient: Gradient, batches: Sequence[Step]) -> Parameters:
        for name, value in gradient(params, batches[0]).items():
            found[name][torch.from_numpy(batches[0].rows)] = value
        return params

    with cohort.trial_fits():
        cohort.fit(names, steps=1, samples=cohort.samples().in_batches("all"), update=CustomStep(note))
    return Reply(gradient=found, num_samples=cohort.num_samples)


def settle(method: Method, cohort: Cohort, shared: dict[str, Any]) -> None:
    """Fit what is a client's own to the newest shared parameters, for clients that were never used.

    Source: Tziotis et al. 2023, remark 4.8. What that is: :attr:`perfed.method.method.Method.fits_unused`.
    """
    if method.fits_unused == "personal parameters":
        cohort.load(shared)
        cohort.fit(cohort.personal_parameters, epochs=method.local_epochs)
    elif method.fits_unused:
        getattr(method, method.fits_unused)(cohort, shared=shared)
        cohort.close_extensions()


def personalise_unused(method: Method, cohort: Cohort, unused: dict[str, Any], **payload: Any) -> None:
    """:func:`settle` with what ``unused`` holds, then the method's ``personalise`` with its ``payload``."""
    carried, cohort.carried = cohort.carried, unused.pop("extensions")
    cohort.extensions = BoundExtensions(method.extensions)
    settle(method, cohort, **unused)
    cohort.extensions, cohort.carried = None, carried
    method.personalise(cohort, **payload)


BUILTIN_PROGRAMS: dict[str, Callable[..., Reply | None]] = {
    f.__name__: f for f in (gradient, settle, personalise_unused)
}
