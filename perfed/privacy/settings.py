"""The table ``[privacy]`` of an experiment."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

from perfed.settings import STRICT, exclude_default


class Privacy(BaseModel):
    """The settings of differential privacy of a run.

    Attributes:
        unit: the protected unit: ``"sample"``, one row of a client, or ``"client"``, all of a client's data.
        epsilon: the budget of each client. Together with ``noise`` it is a limit at which the run ends.
        delta: the probability that the guarantee of epsilon fails; below one over the number of rows, or of clients.
        clip: C, the largest norm of the gradient of a row, or of a client's change in a round.
        noise: z, the standard deviation of the noise over what one row, or one client, can change. Without it, the
            noise is computed from the budget and the planned rounds.
        noises: z of clients by their number of rows, if it differs between clients; the others have ``noise``. It is
            computed with ``sampling = "poisson"``, and saved for runs that are resumed.
        sampling: ``"full"``: each pass uses each row once. ``"poisson"``: each mini-batch includes each row with the
            same probability, independently, which makes the accounting tighter.
        rows: R, the largest norm of a row in sums of rows (class means); rows of a larger norm are scaled down.
        metrics: ``"none"``: no evaluation metrics leave real sites. ``"noisy"``: metrics that are means over test rows
            leave with noise. If rows are protected, test rows have a budget of ``epsilon`` besides that of the training
            rows; if clients are protected, training and metrics share the budget.
        metrics_bound: the largest contribution of a test row to the log-loss, to absolute errors in units of the
            targets' standard deviation, and to squared errors in units of its square.

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
    delta: float = Field(gt=0, lt=1, description="probability that the guarantee of epsilon fails")
    clip: float = Field(1.0, gt=0, description="largest norm of a row's gradient, or of a client's change")
    noise: float | None = Field(None, gt=0, description="noise multiplier; none: computed from epsilon")
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
        4.0,
        gt=0,
        description="largest contribution of a test row to losses and errors",
        exclude_if=exclude_default(4.0),
    )

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.epsilon is None and self.noise is None:
            raise ValueError("privacy needs epsilon, noise or both")
        if self.unit == "client" and self.sampling == "poisson":
            raise ValueError("sampling = 'poisson' draws rows and needs unit = 'sample'")
        if self.noises and (self.noise is None or self.sampling != "poisson" or min(self.noises.values()) <= 0):
            raise ValueError("noises need noise and sampling = 'poisson', and must all be above 0")
        return self
