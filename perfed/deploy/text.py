"""The files of a deployment, made of templates: ``@{name}`` in one stands for what is given as ``name``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources


def filled(template: str, values: Mapping[str, object]) -> str:
    """A file of ``perfed/deploy/templates`` with its placeholders filled; every one needs a value."""
    text = (resources.files("perfed.deploy") / "templates" / template).read_text(encoding="utf-8")
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"@\{(\w+)\}", lambda found: str(values[found[1]]), text))
