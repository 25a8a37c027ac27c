"""Privacy of each row of a client: the client clips the gradient of every row and adds noise to their sum."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from perfed.errors import PerfedError
from perfed.method.declared import FederationInfo
from perfed.method.exchange import Reply
from perfed.method.extension import Extension
from perfed.settings import exclude_default
from perfed.training.cohort import Cohort
from perfed.training.private import PrivateTraining


class SamplePrivacy(Extension):
    """An extension that protects each row: DP-SGD in all local training, and noisy counts and sums.

    Nothing else leaves a client. Personal parameters are trained with DP-SGD as well. If a personal head were fitted
    without noise to the same rows, a single row would influence the gradient of the shared body at every other row
    through the head, and clipping gradients row by row would not bound its influence.
    """

    name: ClassVar[str] = "sample-privacy"
    discreet: ClassVar[bool] = True

    clip: float = Field(1.0, gt=0, description="C, largest norm of a row's gradient")
    noise: float = Field(0.0, ge=0, description="z, noise of a step's sum in units of C")
    rows: float = Field(1.0, gt=0, description="R, largest norm of a row in sums of rows")
    poisson: bool = Field(False, description="whether mini-batches are drawn by Poisson sampling")
    entries: tuple[str, ...] = Field((), description="names of the entries of a reply that may leave")
    of_classes: bool = Field(
        False, description="whether an entry has one value for each class", exclude_if=exclude_default(False)
    )
    noises: dict[int, float] = Field(
        {}, description="z of clients by their number of rows; other clients have noise", exclude_if=exclude_default({})
    )

    def private(self) -> PrivateTraining:
        """Return the clipping and the noise of gradients for all training at clients."""
        return PrivateTraining(self.clip, self.noise, self.rows, self.poisson, noises=self.noises)

    def check(self, info: FederationInfo, moves_shared: bool) -> None:
        """Check that the model and the task can be trained privately.

        Raises:
            PerfedError: if the model has batch-norm statistics, which are not computed from gradients; if the loss of a
                row depends on other rows (survival); or if anchors are used for regression.
        """
        check_classes(self.of_classes, info)
        if info.buffers:
            raise PerfedError(
                f"privacy.unit = 'sample' has no mechanism for '{min(info.buffers)}', statistics of batch-norm; use "
                "another normalisation, such as group-norm"
            )
        if info.task == "survival":
            raise PerfedError(
                "privacy.unit = 'sample' has no mechanism for survival: the loss of a row depends on other rows"
            )

    def outgoing(self, cohort: Cohort, reply: Reply) -> Reply:
        """Return the reply unchanged, after checking its entries.

        Raises:
            PerfedError: if an entry is not declared; names it.
        """
        check_entries(reply, self.entries)
        return reply


def check_classes(of_classes: bool, info: FederationInfo) -> None:
    """Check that the task is classification if an entry that leaves has one value for each class.

    Raises:
        PerfedError: if the task is a regression.
    """
    if of_classes and info.num_classes is None:
        raise PerfedError(
            "privacy has no mechanism for anchors in a regression: they disclose the range of the target values"
        )


def check_entries(reply: Reply, allowed: tuple[str, ...]) -> None:
    """Check that every entry of a reply is among ``allowed``.

    Raises:
        PerfedError: if an entry is not; names it.
    """
    for name in reply:
        if name not in (*allowed, "extensions"):
            raise PerfedError(f"privacy: entry '{name}' of a reply has no mechanism; declared: {', '.join(allowed)}")
