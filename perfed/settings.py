"""What all tables of settings have in common."""

from __future__ import annotations

from pydantic import ConfigDict

STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
"""Values do not change, unknown keys and values of another type are errors, and numbers are finite."""
