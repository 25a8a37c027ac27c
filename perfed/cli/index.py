"""What ``perfed list`` and the help texts say: read from what :mod:`perfed.cli.listing` has written, without torch."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

LISTS = ("methods", "datasets", "experiments", "terms", "leaderboards")
"""What can be listed."""
INDEX: dict[str, Any] = json.loads((resources.files("perfed.cli") / "index.json").read_text(encoding="utf-8"))
"""The lists by name, and of the help texts ``engines`` and ``baselines``."""
