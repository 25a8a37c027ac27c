"""What a site discloses before round 1, field by field, and why none of it needs a mechanism.

A study with ``[privacy]`` declares in ``data.public`` what everybody may know about columns. Sites then disclose only
what follows from the study, from the headers of their files and from their numbers of rows. Neighbouring data sets have
the same number of rows, which determines which rows are test rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfed.data.column import Column
from perfed.data.facts import ClientFacts, SplitFacts
from perfed.data.federation_schema import SiteMetadata
from perfed.errors import PerfedError

_STUDY = "as the study says it (`data.public`)"
_HEADER = "of the site's header, not of its rows"
_NEVER = "no, whatever the rows hold"
_ROWS = "how many rows there are: the same in both neighbours"
_SHARE = "an even share of these"
_SHAPE = "of the header and of `data.public`"

DISCLOSED_BEFORE_ROUND_1: Mapping[type, Mapping[str, str]] = {
    SiteMetadata: {
        "task": _STUDY,
        "labels": _STUDY,
        "classes": _STUDY,
        "numbers": _STUDY,
        "sums": "of the target's range, as the study says it (`data.public`)",
        "domains": _STUDY,
        "columns": "see below",
        "named": _HEADER,
    },
    Column: {
        "name": _HEADER,
        "kind": _STUDY,
        "constant": _NEVER,
        "missing": _NEVER,
        "binary": _NEVER,
        "levels": _STUDY,
        "sums": "of the column's range, as the study says it (`data.public`)",
    },
    ClientFacts: {
        "id": "the site's name",
        "splits": "see below",
        "feature_names": f"a hash; {_SHAPE}",
        "mark": "a hash of the rows made with the site's secret",
        "held": _HEADER,
    },
    SplitFacts: {
        "samples": _ROWS,
        "input_shape": _SHAPE,
        "target_shape": _STUDY,
        "classes": _SHARE,
        "domains": _SHARE,
        "events": "as many as there are rows",
    },
}
"""For each message and each of its fields, the source of the value under ``[privacy]``."""

UNCOUNTED_NOTE = (
    "privacy: classes, levels and scales are computed from the data set's rows here, and are not counted; your own "
    "tables need data.public"
)
"""The note of a simulation whose data are not the user's tables."""


def check_public_columns(options: Mapping[str, Any]) -> None:
    """Check that a study of tables declares in ``data.public`` what is disclosed about columns.

    Args:
        options: options of the data.

    Raises:
        PerfedError: if there is no ``data.public``; says what it must contain.
    """
    if options["public"]:
        return
    target, survival = options["target"], bool(options["event"])
    facts = "categories of columns" if survival else f"classes or sums of '{target}', categories and sums of columns"
    example = "" if survival else f'{target} = ["no", "yes"], '
    raise PerfedError(
        f"privacy: before round 1 sites would disclose {facts} from their rows, which has no mechanism; declare in the "
        f'table [data.public] what anybody may know: {example}sex = ["f", "m"], age = [0, 100]'
    )
