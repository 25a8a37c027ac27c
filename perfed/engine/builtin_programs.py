"""Client programs of the engine itself, which belong to no method."""

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
    """Return the gradient of each client's mean training loss at the received shared parameters, for policies.

    It is computed without extensions, from one mini-batch of all samples, with dropout as in training.
    """
    cohort.load(shared)
    names = cohort.shared_parameters
    gradients = {name: torch.zeros_like(cohort.model[name]) for name in names}

    def record_gradient(params: Parameters, gradient: Gradient, batches: Sequence[Step]) -> Parameters:
        for name, value in gradient(params, batches[0]).items():
            gradients[name][torch.from_numpy(batches[0].rows)] = value
        return params

    with cohort.trial_fits():
        cohort.fit(names, steps=1, samples=cohort.samples().in_batches("all"), update=CustomStep(record_gradient))
    return Reply(gradient=gradients, num_samples=cohort.num_samples)


def settle(method: Method, cohort: Cohort, shared: dict[str, Any]) -> None:
    """Fit the personal parameters of clients that were never used to the newest shared parameters.

    :attr:`perfed.method.method.Method.fits_unused` defines what is fitted.

    Source: Tziotis et al. 2023, remark 4.8.
    """
    if method.fits_unused == "personal parameters":
        cohort.load(shared)
        cohort.fit(cohort.personal_parameters, epochs=method.local_epochs)
    elif method.fits_unused:
        getattr(method, method.fits_unused)(cohort, shared=shared)
        cohort.close_extensions()


def personalise_unused(method: Method, cohort: Cohort, unused: dict[str, Any], **payload: Any) -> None:
    """Run :func:`settle` with the content of ``unused``, then the method's ``personalise`` with ``payload``."""
    carried, cohort.carried = cohort.carried, unused.pop("extensions")
    cohort.extensions = BoundExtensions(method.extensions)
    settle(method, cohort, **unused)
    cohort.extensions, cohort.carried = None, carried
    method.personalise(cohort, **payload)


BUILTIN_PROGRAMS: dict[str, Callable[..., Reply | None]] = {
    f.__name__: f for f in (gradient, settle, personalise_unused)
}
