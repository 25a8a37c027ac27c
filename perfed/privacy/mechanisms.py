"""What leaves a client in every method, and by which mechanism it may leave: the one table.

A reply's entries are released together: under ``unit = "sample"`` those that are not made of trained parameters alone
add their own releases, one after the other; under ``unit = "client"`` all of them are one vector, which is cut as a
whole. An entry without a mechanism is refused by name before the run begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from perfed.errors import PerfedError
from perfed.method.extension import Extension
from perfed.method.method import Method
from perfed.method.registry import entry, method_names
from perfed.methods.apfl import APFL
from perfed.methods.ditto import Ditto
from perfed.methods.extensions.clip import Clip
from perfed.methods.extensions.prototypes import Prototypes
from perfed.methods.extensions.proximal import Proximal
from perfed.methods.extensions.server_optimizer import ServerOptimizer
from perfed.methods.extensions.top_k import TopK
from perfed.methods.fedala import FedALA
from perfed.methods.fedamp import FedAMP
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedavg_ft import FedAvgFT
from perfed.methods.fedbabu import FedBABU
from perfed.methods.fedbn import FedBN
from perfed.methods.fedper import FedPer, LGFedAvg
from perfed.methods.fedproto import FedProto
from perfed.methods.fedrep import FedRep
from perfed.methods.fedrod import FedRoD
from perfed.methods.flic.anchors import Anchors
from perfed.methods.flic.flic import FLICHL, FLICClass
from perfed.methods.flic.hetfedrep import HetFedRep
from perfed.methods.knnper import KNNPer
from perfed.methods.local import Local, LocalFull
from perfed.methods.mr_mtl import MRMTL
from perfed.methods.pfedme import PFedMe

Unit = Literal["sample", "client"]


@dataclass(frozen=True)
class Mechanism:
    """How one kind of entry leaves.

    Attributes:
        name: of the kind.
        sample: what is done to it where rows are protected; empty: it has no mechanism.
        client: where clients are; empty: it has none.
        sensitivity: what one row, or one client, can change of it, in units that noise is a multiple of.
        counts: what is counted, where a run releases it once, with the same noise in every reply; else empty.
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
HELD = Mechanism(
    "classes held", "of noisy class counts", "does not leave: all clients weigh the same", "1 (a row)", counts="classes"
)
METRICS = Mechanism(
    "metrics of evaluation",
    'with `metrics = "noisy"` at real sites: means over n test rows, each cut to its bound B; noise z B / n',
    "the same; noise z B on a client's mean, or a share of it where the server sees sums alone",
    "B / n (a test row); B (a client)",
)
NONE: dict[str, Mechanism] = {
    name: Mechanism(name)
    for name in ("losses", "second moments", "Hessians", "kernels", "trees", "domain counts", "choices", "features")
}
"""Kinds that have no mechanism."""


def _nothing(of: Any) -> int:
    return 0


@dataclass(frozen=True)
class Declared:
    """What a method, or an extension, sends and how often it looks at rows beside the local epochs of its rounds.

    Attributes:
        entries: of its replies, by name.
        once: kinds of counts that it uses whether or not they leave.
        round: releases of each round beside the passes over the data in ``epochs_in``.
        before: releases before round 1.
        own: releases for a client's own model, made when the run has ended.
        refused: by unit, why it cannot be private, where its entries do not say it.
    """

    entries: Mapping[str, Mechanism] = field(default_factory=dict)
    once: tuple[Mechanism, ...] = ()
    round: Callable[[Any], int] = _nothing
    before: Callable[[Any], int] = _nothing
    own: Callable[[Any], int] = _nothing
    refused: Mapping[Unit, str] = field(default_factory=dict)


_MEAN = {"shared": PARAMETERS, "num_samples": ROWS}
_CALLED: dict[Unit, str] = {
    "sample": "it looks at rows otherwise than by training, and cutting gradients row by row then bounds nothing"
}
_SINGLE: dict[Unit, str] = {"client": "its server needs single replies, and noise is on their mean"}


def _finetune(method: Any) -> int:
    return int(method.finetune_epochs)


DECLARED: dict[type, Declared] = {
    APFL: Declared({"shared": PARAMETERS}),
    Ditto: Declared(_MEAN),
    FedALA: Declared(_MEAN, refused=_CALLED),
    FedAMP: Declared({"shared": PARAMETERS}, refused=_SINGLE),
    FedAvg: Declared(_MEAN),
    FedAvgFT: Declared(_MEAN, own=_finetune),
    FedBABU: Declared(_MEAN, own=_finetune),
    FedBN: Declared(_MEAN, refused={"sample": "batch-norm's statistics are of many rows at once"}),
    FedPer: Declared(_MEAN),
    FedProto: Declared(),
    FedRep: Declared(_MEAN),
    FedRoD: Declared(_MEAN, once=(CLASS_COUNTS,)),
    FLICClass: Declared(_MEAN),
    FLICHL: Declared(_MEAN),
    HetFedRep: Declared(_MEAN),
    KNNPer: Declared(_MEAN, refused={"sample": "its clients' own models hold their rows"}),
    LGFedAvg: Declared(_MEAN),
    Local: Declared(),
    LocalFull: Declared(),
    MRMTL: Declared({"shared": PARAMETERS}),
    PFedMe: Declared({"shared": PARAMETERS}),
    Anchors: Declared(
        {"mean": ANCHORS, "weight": HELD, "factor": NONE["second moments"]},
        once=(CLASS_COUNTS,),
        round=lambda anchors: 1 + anchors.realign_epochs,
        before=lambda anchors: int(anchors.pretrain_epochs),
    ),
    Clip: Declared(),
    Prototypes: Declared({"means": CLASS_MEANS, "counts": CLASS_COUNTS}, once=(CLASS_COUNTS,), round=lambda of: 1),
    Proximal: Declared(),
    ServerOptimizer: Declared(),
    TopK: Declared(refused={"client": "what a client has not sent yet is added to its change after that was cut"}),
}
"""By class what a method or an extension sends; one that is not here is refused."""


def declare(of: type[Method] | type[Extension], declared: Declared) -> None:
    """Say what a method or an extension of one's own sends.

    Example:
        >>> from perfed.methods.fedavg import FedAvg
        >>> class MyFedAvg(FedAvg):
        ...     pass
        >>> declare(MyFedAvg, Declared({"shared": PARAMETERS, "num_samples": ROWS}))
    """
    DECLARED[of] = declared


def declared_of(part: Method | Extension, name: str, unit: Unit) -> Declared:
    """Return what ``part`` of a run sends, all of which may leave under ``unit``.

    Args:
        part: the method, or one of its extensions.
        name: what messages call it.
        unit: that is protected.

    Raises:
        PerfedError: nothing is declared of it, or an entry has no mechanism; names it.
    """
    found = DECLARED.get(type(part))
    if found is None:
        raise PerfedError(
            f"privacy: nothing is declared of what {name} sends, so that it has no mechanism; allowed methods: "
            f"{', '.join(sorted(kind.__name__ for kind in DECLARED if issubclass(kind, Method)))}"
        )
    if why := found.refused.get(unit):
        raise PerfedError(f"privacy.unit = '{unit}' has no mechanism for {name}: {why}")
    for own, kind in found.entries.items():
        if not (kind.sample if unit == "sample" else kind.client) and own not in optional(part):
            raise PerfedError(f"privacy.unit = '{unit}' has no mechanism for entry '{own}' of {name} ({kind.name})")
    return found


def optional(part: Method | Extension) -> set[str]:
    """Return entries that ``part`` does not send with its settings."""
    return {"factor"} if isinstance(part, Anchors) and part.covariance == "fixed" else set()


def leaving_table() -> list[tuple[str, str, str, str]]:
    """Return what leaves in every registered method, for the page on privacy.

    Returns:
        Rows of method, entries of its replies with their kinds, and whether rows and clients can be protected: "yes",
        or why not. Methods of which nothing is declared are refused under both units.

    Example:
        >>> next(row for row in leaving_table() if row[0] == "fedavg")
        ('fedavg', 'shared (parameters), num_samples (number of rows)', 'yes', 'yes')
    """
    return [(name, _entries(name), _allowed(name, "sample"), _allowed(name, "client")) for name in method_names()]


def _parts(name: str) -> list[type]:
    found = entry(name)
    return [found.method, *found.extensions]


def _entries(name: str) -> str:
    parts = _parts(name)
    if any(part not in DECLARED for part in parts):
        return "not declared"
    sent = {own: kind for part in parts for own, kind in DECLARED[part].entries.items() if own != "factor"}
    return ", ".join(f"{own} ({kind.name})" for own, kind in sent.items()) or "nothing"


def _allowed(name: str, unit: Unit) -> str:
    for part in _parts(name):
        if part not in DECLARED:
            return "no: nothing is declared"
        if why := DECLARED[part].refused.get(unit):
            return f"no: {why}"
        for own, kind in DECLARED[part].entries.items():
            if own != "factor" and not (kind.sample if unit == "sample" else kind.client):
                return f"no: {own}"
    return "yes"
