"""Training that diverged, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from perfed.errors import PerfedError


@contextmanager
def diverging(where: str) -> Iterator[None]:
    """Matrices that cannot be factorised come from values that overflowed: say so in one line."""
    try:
        yield
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        reason = str(error).partition(": ")[0]
        raise PerfedError(
            f"{where}: training diverged: {reason} failed on values that are no longer finite; lower the learning rate"
        ) from None
