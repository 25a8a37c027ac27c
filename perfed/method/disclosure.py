"""What clients disclose: the entries of a reply, and the mechanism by which each kind of entry can be made private.

A method or an extension declares its own in the class attribute ``disclosure``; ``[privacy]`` plans its releases by it.
A reply's entries are released together: under ``unit = "sample"`` those that are made of anything but trained
parameters add their own releases, one after the other; under ``unit = "client"`` all of them are one vector, which is
cut as a whole. An entry without a mechanism is refused by name before the run begins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Unit = Literal["sample", "client"]
"""What is protected: each row, or each client as a whole."""


@dataclass(frozen=True)
class Mechanism:
    """How one kind of entry is released.

    Attributes:
        name: name of the kind.
        sample: what is done to it where rows are protected; empty: it has no mechanism.
        client: what is done to it where clients are protected; empty: it has no mechanism.
        sensitivity: what one row, or one client, can change of it, in units that noise is a multiple of.
        counts: what is counted, where a run releases it once, with the same noise in every reply; otherwise empty.
    """

    name: str
    sample: str = ""
    client: str = ""
    sensitivity: str = ""
    counts: str = ""

    @property
    def once(self) -> bool:
        """Whether a run releases it once."""
        return bool(self.counts)


_CUT = "the change is cut to the norm C together with the reply's other entries; noise z C / m on the mean of m"
PARAMETERS = Mechanism(
    "parameters",
    "made of noisy gradients alone, each row's cut to the norm C; noise z C on their sum in every step",
    _CUT,
    "C (a row's gradient); C (a client's change)",
)
ROWS = Mechanism(
    "number of rows",
    "noise z on the count, drawn once",
    "does not leave: all clients weigh the same",
    "1 (a row); 0 (a client)",
    counts="rows",
)
CLASS_COUNTS = Mechanism(
    "class counts", "noise z on every class, absent ones too, drawn once", "", "1 (a row)", counts="classes"
)
CLASS_MEANS = Mechanism(
    "class means", "sums of rows cut to the norm R with noise z R, over noisy counts, of every class", "", "R (a row)"
)
ANCHORS = Mechanism("anchors", "a step from noisy class means and counts", _CUT, "R (a row); C (a client's change)")
PRESENT_CLASSES = Mechanism(
    "classes held", "of noisy class counts", "does not leave: all clients weigh the same", "1 (a row)", counts="classes"
)
MECHANISMS = (PARAMETERS, ROWS, CLASS_COUNTS, CLASS_MEANS, ANCHORS, PRESENT_CLASSES)
"""Kinds that have a mechanism, where rows are protected, clients, or both."""
NONE: dict[str, Mechanism] = {
    name: Mechanism(name)
    for name in ("losses", "second moments", "Hessians", "kernels", "trees", "domain counts", "choices", "features")
}
"""Kinds that have no mechanism."""


def _no_releases(part: Any) -> int:
    return 0


def _no_entries(part: Any) -> Collection[str]:
    return ()


@dataclass(frozen=True)
class Disclosure:
    """What a method, or an extension, sends and how often it looks at rows beside the local epochs of its rounds.

    Functions get the method or extension with its settings.

    Attributes:
        entries: entries of its replies, by name.
        counts: kinds of counts that it uses whether or not they leave.
        per_round: releases of each round beside the passes over the data in ``epochs_in``.
        before_rounds: releases before round 1.
        after_run: releases for a client's own model, made when the run has ended.
        absent: entries that it does not send with its settings.
        refused: by unit, why it cannot be private, where its entries do not say it.

    Example:
        >>> from perfed.methods.fedavg import FedAvg
        >>> class MyFedAvg(FedAvg):
        ...     disclosure = Disclosure({"shared": PARAMETERS, "num_samples": ROWS})
    """

    entries: Mapping[str, Mechanism] = field(default_factory=dict)
    counts: tuple[Mechanism, ...] = ()
    per_round: Callable[[Any], int] = _no_releases
    before_rounds: Callable[[Any], int] = _no_releases
    after_run: Callable[[Any], int] = _no_releases
    absent: Callable[[Any], Collection[str]] = _no_entries
    refused: Mapping[Unit, str] = field(default_factory=dict)

    def sent_entries(self, part: Any) -> dict[str, Mechanism]:
        """Return the entries that ``part`` sends with its settings."""
        absent = self.absent(part)
        return {name: kind for name, kind in self.entries.items() if name not in absent}


def disclosure_of(kind: type) -> Disclosure | None:
    """Return what a method's or an extension's class declares itself; ``None`` if it declares nothing.

    A declaration is not inherited: a subclass may send something else.
    """
    disclosure: Disclosure | None = vars(kind).get("disclosure")
    return disclosure
