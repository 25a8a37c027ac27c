"""What clients disclose: the entries of a reply, and the privacy mechanism of each kind of entry.

A method or an extension declares its entries in the class attribute ``disclosure``, and ``[privacy]`` plans the
releases from it. The entries of a reply are released together. Under ``unit = "sample"`` every entry that consists of
anything but trained parameters adds releases of its own, which are composed in sequence. Under ``unit = "client"`` all
entries are one vector, which is clipped as a whole. An entry without a mechanism is refused by name before the run
starts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Unit = Literal["sample", "client"]
"""The unit that is protected: each row, or each client as a whole."""


@dataclass(frozen=True)
class Mechanism:
    """The privacy mechanism for one kind of entry.

    Attributes:
        name: name of the kind.
        sample: how it is made private if rows are protected; empty if it has no mechanism.
        client: how it is made private if clients are protected; empty if it has no mechanism.
        sensitivity: how much one row, or one client, can change it, in the unit of which the noise is a multiple.
        counts: the kind of count that a run releases once, with the same noise in every reply; empty for other entries.
    """

    name: str
    sample: str = ""
    client: str = ""
    sensitivity: str = ""
    counts: str = ""

    @property
    def once(self) -> bool:
        """Whether a run releases it only once."""
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
"""Kinds that have a mechanism for the protection of rows, of clients, or of both."""
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
    """The entries that a method or an extension sends, and its accesses to rows besides local training.

    The functions receive the method or extension with its settings.

    Attributes:
        entries: the kind of each entry of the replies, by name.
        counts: kinds of counts that are used, whether or not they are sent.
        per_round: releases in each round besides the passes over the data in ``epochs_in``.
        before_rounds: releases before round 1.
        after_run: releases for the model of a single client, made after the run has ended.
        absent: names of entries that are not sent with the current settings.
        refused: by unit, why privacy is impossible, if the entries alone do not show it.

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
        """Return the entries that ``part``, a method or an extension, sends with its settings."""
        absent = self.absent(part)
        return {name: kind for name, kind in self.entries.items() if name not in absent}


def find_disclosure(kind: type) -> Disclosure | None:
    """Return the disclosure that a class of methods or extensions declares itself; ``None`` if it declares none.

    A disclosure is not inherited, because a subclass may send something else.
    """
    disclosure: Disclosure | None = vars(kind).get("disclosure")
    return disclosure
