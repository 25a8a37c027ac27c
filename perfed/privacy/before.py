"""What a site tells before round 1, field by field, and why none of it is a mechanism's: the one table.

A study with ``[privacy]`` says in ``data.public`` what all may know of columns. What sites tell then is of the study,
of their files' headers and of how many rows they have. The latter is the same in both neighbours, and which rows are
tested on depends on nothing else.
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

BEFORE: Mapping[type, Mapping[str, str]] = {
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
"""By message, of each field what it is under ``[privacy]``."""

UNCOUNTED = (
    "privacy: classes, levels and scales are of the data set's rows here, and are not counted; tables of your own need "
    "data.public"
)
"""What a simulation says whose data are not tables of the user's."""


def check_public(options: Mapping[str, Any]) -> None:
    """Refuse a study of tables that leaves to the sites what is told of their columns.

    Args:
        options: of the data.

    Raises:
        PerfedError: there is no ``data.public``; says what is to be in it.
    """
    if options["public"]:
        return
    target, survival = options["target"], bool(options["event"])
    told = "categories of columns" if survival else f"classes or sums of '{target}', categories and sums of columns"
    example = "" if survival else f'{target} = ["no", "yes"], '
    raise PerfedError(
        f"privacy: before round 1 sites would tell {told} from their rows, which has no mechanism; say in the table "
        f'[data.public] what anybody may know: {example}sex = ["f", "m"], age = [0, 100]'
    )
