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
        clients: the number of clients; ``natural`` uses the first owners with training samples, by default all.
        samples: the number of training samples of every client, or a list from which each client's number is drawn
            uniformly; with 0 (``iid``, ``pathological``), all samples are distributed equally.
        test_samples: the number of test samples of every client, in proportion to its training classes (domains). With
            0, a client has the same fraction of the test data as of the training data in each class; ``domain-mixed``
            distributes all test samples of a domain in proportion to the clients' training samples in it.
        size_spread: the spread of clients' sizes, which are log-normal: ``samples`` times exp(size_spread z), z ~ N(0,
            1); with ``samples`` = 0 (``iid``), all samples are distributed in such proportions.
        overlap: whether clients may share samples if a class has too few: ``none``, only samples of the ``test`` data,
            or ``all``. No client has a sample twice, and no test sample is also a training sample.
        uniform: a percentage from 0 to 100.
        dominant_classes: the dominant classes of each group; the default depends on the data set (three consecutive
            classes, starting at every second class; digits, upper and lower case for 62 classes).
        classes_per_client: a number, or a list with one number per group of clients.
        class_assignment: ``random``: every client draws its own classes; ``clustered``: the clients of a group share
            the same consecutive classes.
        concentration: the concentration of the Dirichlet distribution.
        alpha: the concentration of the mixtures Dir(alpha p) over domains; small values give clients few domains.
        prior: p, either each domain's ``shares`` of the training data, or ``uniform``.
        uniform_labels: whether every client has the same number of training samples of each label (``domain-mixed``).
        min_samples: the smallest number of training samples of a client; ``dirichlet`` repeats the draw until all have
            as many, and ``natural`` leaves out owners with fewer, by default none.
        groups: the number of groups for ``permute_labels`` and ``rotations``; 1 for as many as ``rotations``.
        group_order: ``contiguous`` blocks of clients, or ``interleaved`` (client i in group i mod groups).
        permute_labels: whether each group has its own permutation of the labels (concept shift).
        rotations: the angles in degrees, counter-clockwise, by which each group's images are rotated (feature skew).
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
