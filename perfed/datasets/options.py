"""Options of all data sets whose samples are distributed to clients by a partition."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from perfed.data.partition.label_skew import GroupOrder
from perfed.datasets.catalogue import NonNegative, NonNegativeReal, Positive, PositiveReal
from perfed.errors import PerfedError

Percentage = Annotated[float, Field(ge=0, le=100)]

# Options of all partitions by label, and the options of each partition.
_COMMON = {"partition", "clients", "test_samples", "overlap", "group_order", "permute_labels", "rotations"}
_APPLICABLE = {
    "iid": {*_COMMON, "samples", "size_spread", "groups"},
    "dominant": {*_COMMON, "samples", "size_spread", "uniform", "dominant_classes"},
    "pathological": {*_COMMON, "samples", "size_spread", "classes_per_client", "class_assignment"},
    "dirichlet": {*_COMMON, "concentration", "min_samples", "groups"},
    "inner-dirichlet": {*_COMMON, "samples", "size_spread", "concentration", "groups"},
    "natural": {"partition", "clients", "min_samples"},
    "domain-mixed": {
        "partition",
        "clients",
        "samples",
        "size_spread",
        "test_samples",
        "alpha",
        "prior",
        "uniform_labels",
    },
}


class PartitionOptions(BaseModel):
    """Options for distributing the samples of a pooled data set to clients.

    Attributes:
        partition: ``iid``: at random; ``dominant``: ``uniform`` % of a client's samples uniformly over all classes, the
            rest from the dominant classes of its group; ``pathological``: a few classes each; ``dirichlet``: Dirichlet
            shares of every class, all samples used; ``inner-dirichlet``: Dirichlet class distribution of every client;
            ``natural``: one owner (writer, user, site), one client; ``domain-mixed``: every client has its own
            mixture of domains.
        clients: how many; ``natural`` takes the first ones that have training samples, all if not given.
        samples: training samples of every client, or a list from which each client's number is drawn uniformly;
            0 (``iid``, ``pathological``): all there are, shared equally.
        test_samples: test samples of every client, in proportion to its training classes (domains); 0: the same part
            of the test data as of the training data, class by class; ``domain-mixed``: all test samples of a domain,
            shared in proportion to the clients' training samples of it.
        size_spread: clients' sizes are log-normal: ``samples`` times exp(size_spread z), z ~ N(0, 1); with ``samples``
            = 0 (``iid``) all there are, in such shares.
        overlap: whether clients may share samples where a class does not suffice: ``none``, only those of the
            ``test`` data, or ``all``. No client holds a sample twice, and no test sample is trained on.
        uniform: percentage, 0 to 100.
        dominant_classes: the dominant classes of each group; none given: the data set's own (three consecutive
            classes from every second one on; digits, upper and lower case for 62 classes).
        classes_per_client: a number, or a list with one number per group of clients.
        class_assignment: ``random``: every client draws its own classes; ``clustered``: the clients of a group share
            the same consecutive classes.
        concentration: of the Dirichlet distribution.
        alpha: the mixtures are drawn from Dir(alpha p) over the domains; small values give clients few domains.
        prior: p, each domain's ``shares`` of the training data, or ``uniform``.
        uniform_labels: every client has as many training samples of each label (``domain-mixed``).
        min_samples: every client has at least so many training samples; ``dirichlet`` repeats the draw until it is so,
            ``natural`` leaves out the owners who have fewer, by default none.
        groups: number of groups for ``permute_labels`` and ``rotations``; 1: as many as ``rotations``.
        group_order: ``contiguous`` blocks of clients, or ``interleaved`` (client i in group i mod groups).
        permute_labels: concept shift, each group has its own permutation of the labels.
        rotations: feature skew, the angle in degrees (counter-clockwise) by which each group's images are turned.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    partition: Literal["iid", "dominant", "pathological", "dirichlet", "inner-dirichlet", "natural", "domain-mixed"] = (
        "iid"
    )
    clients: Positive = 20
    samples: NonNegative | list[Positive] = 600
    test_samples: NonNegative = 0
    size_spread: NonNegativeReal = 0.0
    overlap: Literal["none", "test", "all"] = "none"
    uniform: Percentage = 20.0
    dominant_classes: list[list[NonNegative]] = []
    classes_per_client: Positive | list[Positive] = 2
    class_assignment: Literal["random", "clustered"] = "random"
    concentration: PositiveReal = 1.0
    alpha: PositiveReal = 1.0
    prior: Literal["shares", "uniform"] = "shares"
    uniform_labels: bool = False
    min_samples: NonNegative = 10
    groups: Positive = 1
    group_order: GroupOrder = "contiguous"
    permute_labels: bool = False
    rotations: list[float] = []

    @model_validator(mode="after")
    def _check_partition(self) -> PartitionOptions:
        applicable = _APPLICABLE[self.partition]
        for key in PartitionOptions.model_fields:
            if key in self.model_fields_set and key not in applicable:
                allowed = ", ".join(name for name in PartitionOptions.model_fields if name in applicable)
                raise PerfedError(
                    f"data.{key} is not an option of partition '{self.partition}'; its options: {allowed}"
                )
        for key in ("samples", "classes_per_client"):
            if getattr(self, key) == []:
                raise PerfedError(f"data.{key} = [] is not allowed; the list needs at least one number")
        if self.samples == 0 and "samples" in applicable and self.partition not in ("iid", "pathological"):
            raise PerfedError("data.samples = 0 (all there are) is for the partitions 'iid' and 'pathological'")
        if self.samples == 0 and self.size_spread and self.partition == "pathological":
            raise PerfedError("data.size_spread needs data.samples above 0 in partition 'pathological'")
        if self.partition == "natural":
            self.clients = self.clients if "clients" in self.model_fields_set else 0  # all owners
            self.min_samples = self.min_samples if "min_samples" in self.model_fields_set else 1
        return self


def change_defaults(**defaults: Any) -> type[PartitionOptions]:
    """Return the same options with other default values."""
    hints = get_type_hints(PartitionOptions, include_extras=True)
    fields: dict[str, Any] = {key: (hints[key], value) for key, value in defaults.items()}
    return create_model("PartitionOptions", __base__=PartitionOptions, **fields)
