"""Tables of docs/privacy.md, of the code and of kept numbers: ``python docs/privacy_tables.py`` writes them."""

from __future__ import annotations

import re
from pathlib import Path

import private_tables

from perfed.method.disclosure import MECHANISMS, NONE
from perfed.privacy.before import DISCLOSED_BEFORE_ROUND_1
from perfed.privacy.mechanisms import METRICS, list_disclosures

PAGE = Path(__file__).with_name("privacy.md")


def before() -> str:
    """What a site tells before round 1, field by field."""
    rows = [
        f"| `{message.__name__}.{name}` | {how} |"
        for message, fields in DISCLOSED_BEFORE_ROUND_1.items()
        for name, how in fields.items()
    ]
    return "\n".join(["| what a site tells | under `[privacy]` |", "|---|---|", *rows])


def tables() -> dict[str, str]:
    """The tables by the names of their places."""
    kinds = [*MECHANISMS, METRICS]
    of_kinds = ["| kind | rows protected | clients protected | sensitivity |", "|---|---|---|---|"]
    of_kinds += [f"| {k.name} | {k.sample or 'refused'} | {k.client or 'refused'} | {k.sensitivity} |" for k in kinds]
    of_kinds += [f"| {k.name} | refused | refused | |" for k in NONE.values()]
    rows = [row for row in list_disclosures() if row[1] != "not declared"]
    of_methods = ["| method | sends | rows | clients |", "|---|---|---|---|"]
    of_methods += [f"| `{name}` | {sent} | {sample} | {client} |" for name, sent, sample, client in rows]
    found = {"before": before(), "mechanisms": "\n".join(of_kinds), "methods": "\n".join(of_methods)}
    return found | {"worked example": private_tables.example()}


def written(page: str) -> str:
    """The page with its tables as the code says them."""
    for name, table in tables().items():
        page = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", rf"\g<1>{table}\n\g<2>", page, count=1, flags=re.S)
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
