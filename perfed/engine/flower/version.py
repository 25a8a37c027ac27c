"""Which Flower this is made for."""

from __future__ import annotations

from importlib import metadata

from perfed.errors import PerfedError

OLDEST, BEFORE = (1, 41), (1, 43)
RANGE = f"flwr >={'.'.join(map(str, OLDEST))},<{'.'.join(map(str, BEFORE))}"
"""The same for people, and for pip."""


def check_flower() -> None:
    """Do nothing where a Flower is installed that perfed was tested with.

    Raises:
        PerfedError: there is none, or another version.
    """
    try:
        version = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise PerfedError(f"a federation of sites needs {RANGE}: pip install 'perfed[flower]'") from None
    if not OLDEST <= tuple(int(part) for part in version.split(".")[:2]) < BEFORE:
        raise PerfedError(f"flwr {version} is installed, but perfed needs {RANGE}: pip install 'perfed[flower]'")
