"""Privacy of each row of a client: every gradient is made of cut gradients of rows and of noise, at the client."""

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
    """Protects each row: DP-SGD in all local training, noisy counts and sums; nothing else leaves.

    Personal parameters are trained so as well. Fitted without noise on the same rows, a personal head would carry a row
    into the gradient of the shared body at every other row, and cutting gradients row by row would bound nothing.
    """

    name: ClassVar[str] = "sample-privacy"
    discreet: ClassVar[bool] = True

    clip: float = Field(1.0, gt=0, description="C, largest norm of a row's gradient")
    noise: float = Field(0.0, ge=0, description="z, noise of a step's sum in units of C")
    rows: float = Field(1.0, gt=0, description="R, largest norm of a row in sums of rows")
    poisson: bool = Field(False, description="whether rows are in mini-batches by coins")
    entries: tuple[str, ...] = Field((), description="what may leave, by name")
    of_classes: bool = Field(
        False, description="whether something that leaves is of classes", exclude_if=exclude_default(False)
    )
    noises: dict[int, float] = Field(
        {}, description="z by number of rows; others: noise", exclude_if=exclude_default({})
    )

    def private(self) -> PrivateTraining:
        """Cut and noisy gradients wherever a client trains."""
        return PrivateTraining(self.clip, self.noise, self.rows, self.poisson, noises=self.noises)

    def check(self, info: FederationInfo, moves_shared: bool) -> None:
        """Refuse models that send what is not made of gradients, losses that are not of rows one by one, anchors of
        values."""
        check_classes(self.of_classes, info)
        if info.buffers:
            raise PerfedError(
                f"privacy.unit = 'sample' has no mechanism for '{min(info.buffers)}', statistics of batch-norm; use "
                "another normalisation, such as group-norm"
            )
        if info.task == "survival":
            raise PerfedError("privacy.unit = 'sample' has no mechanism for survival: a row's loss is of many rows")

    def outgoing(self, cohort: Cohort, reply: Reply) -> Reply:
        """Return the reply as it is.

        Raises:
            PerfedError: an entry that was not declared; names it.
        """
        check_entries(reply, self.entries)
        return reply


def check_classes(of_classes: bool, info: FederationInfo) -> None:
    """Refuse values (regression) where what leaves is of classes.

    Raises:
        PerfedError: it is.
    """
    if of_classes and info.num_classes is None:
        raise PerfedError("privacy has no mechanism for anchors of values (regression): the range of responses leaves")


def check_entries(reply: Reply, allowed: tuple[str, ...]) -> None:
    """Refuse a reply with an entry that is not among ``allowed``.

    Raises:
        PerfedError: names the entry.
    """
    for name in reply:
        if name not in (*allowed, "extensions"):
            raise PerfedError(f"privacy: entry '{name}' of a reply has no mechanism; declared: {', '.join(allowed)}")
