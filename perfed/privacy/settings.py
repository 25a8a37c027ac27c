"""The table ``[privacy]`` of an experiment."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

from perfed.settings import STRICT, exclude_default


class Privacy(BaseModel):
    """Differential privacy of a run.

    Attributes:
        unit: whose data one cannot tell from what leaves: a ``"sample"`` (a row) of a client, or a whole ``"client"``.
        epsilon: the budget of each client. With ``noise`` it is a limit, at which the run ends.
        delta: probability with which more may be told; below one over the number of rows, or of clients.
        clip: C, largest norm of the gradient of a row, or of a client's change in a round.
        noise: z, standard deviation of the noise in units of what one row, or one client, can change. Without it the
            noise is found for the budget and the planned rounds.
        noises: z of clients by their number of rows, where they differ; the others have ``noise``. Found with
            ``sampling = "poisson"``, and written down for runs that go on.
        sampling: ``"full"``: each row is once in a pass. ``"poisson"``: by a coin in each mini-batch, which is counted
            as such.
        rows: R, largest norm of a row in sums of rows (class means); longer ones are cut.
        metrics: whether metrics of evaluation leave real sites: ``"none"`` does, or those that are means over test rows
            do with noise. Test rows are no training rows: where rows are protected, ``epsilon`` is a budget of theirs
            too. Where clients are, training and metrics share it.
        metrics_bound: most that a test row counts in log-loss; in errors of a regression in units of the targets'
            standard deviation, in squared ones of its square.

    Example:
        >>> Privacy(epsilon=6.0, delta=1e-3).unit
        'sample'
        >>> Privacy(delta=1e-3)
        Traceback (most recent call last):
        ...
        pydantic_core._pydantic_core.ValidationError: ...privacy needs epsilon, noise or both...
    """

    model_config = STRICT

    unit: Literal["sample", "client"] = "sample"
    epsilon: float | None = Field(None, gt=0, description="budget of each client; with noise, where the run ends")
    delta: float = Field(gt=0, lt=1, description="probability with which more may be told")
    clip: float = Field(1.0, gt=0, description="largest norm of a row's gradient, or of a client's change")
    noise: float | None = Field(None, gt=0, description="noise multiplier; none: found for epsilon")
    noises: dict[Annotated[int, Field(strict=False)], float] = Field(
        {}, description="noise multipliers by number of rows", exclude_if=exclude_default({})
    )
    sampling: Literal["full", "poisson"] = Field(
        "full", description="how mini-batches are drawn", exclude_if=exclude_default("full")
    )
    rows: float = Field(1.0, gt=0, description="largest norm of a row in sums of rows", exclude_if=exclude_default(1.0))
    metrics: Literal["none", "noisy"] = Field(
        "none",
        description="metrics that leave real sites: none, or means over test rows with noise",
        exclude_if=exclude_default("none"),
    )
    metrics_bound: float = Field(
        4.0, gt=0, description="most that a test row counts in losses and errors", exclude_if=exclude_default(4.0)
    )

    @model_validator(mode="after")
    def _has_a_budget(self) -> Self:
        if self.epsilon is None and self.noise is None:
            raise ValueError("privacy needs epsilon, noise or both")
        if self.unit == "client" and self.sampling == "poisson":
            raise ValueError("sampling = 'poisson' is of rows, for unit = 'sample'")
        if self.noises and (self.noise is None or self.sampling != "poisson" or min(self.noises.values()) <= 0):
            raise ValueError("noises, all above 0, go with noise and sampling = 'poisson'")
        return self
