"""What releases cost: epsilon of a number of Gaussian mechanisms, and the noise with which a budget lasts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from math import inf, sqrt

from perfed.errors import PerfedError
from perfed.system import extra_command

_LARGEST_NOISE = 1e5
_EXACT = 1e-3


@dataclass(frozen=True)
class Releases:
    """What has been told of one client, each with noise of z times what a row (or the client) can change.

    Attributes:
        whole: releases that the row is in.
        drawn: releases that it is in with probability ``rate``, by a secret coin for each (Poisson sampling).
        rate: of those.

    Example:
        >>> Releases(2) + Releases(3, drawn=10, rate=0.1)
        Releases(whole=5, drawn=10, rate=0.1)
    """

    whole: int = 0
    drawn: int = 0
    rate: float = 1.0

    def __add__(self, other: Releases) -> Releases:
        rates = {r.rate for r in (self, other) if r.drawn}
        return Releases(self.whole + other.whole, self.drawn + other.drawn, max(rates, default=1.0))

    def times(self, count: int) -> Releases:
        """Return ``count`` times the same."""
        return Releases(self.whole * count, self.drawn * count, self.rate)


@lru_cache(maxsize=4096)
def epsilon(noise: float, releases: Releases, delta: float) -> float:
    """Return epsilon of ``releases`` with the noise multiplier ``noise`` at ``delta``.

    k Gaussian mechanisms with noise z, each chosen after the ones before, tell exactly as much as one with
    ``z / sqrt(k)`` (Dong et al. 2022, corollary 2), whose epsilon has a closed form (Balle & Wang 2018, theorem 8);
    with Poisson sampling the privacy losses are composed numerically (Koskela et al. 2020). Both by dp-accounting, for
    data sets of which one has a row (a client) that the other lacks.

    Returns:
        0 where nothing was told, infinite without noise.

    Example:
        >>> round(epsilon(2.0, Releases(1), 1e-3), 3)
        1.352
    """
    if not (releases.whole or releases.drawn):
        return 0.0
    if noise <= 0:
        return inf
    if find_spec("dp_accounting") is None:
        raise PerfedError(f"[privacy] needs dp-accounting: {extra_command('privacy')}")
    library = import_module("dp_accounting")
    if not releases.drawn:
        return float(library.get_epsilon_gaussian(noise / sqrt(releases.whole), delta))
    accountant = import_module("dp_accounting.pld").PLDAccountant()
    if releases.whole:
        accountant.compose(library.GaussianDpEvent(noise / sqrt(releases.whole)))
    sampled = library.PoissonSampledDpEvent(releases.rate, library.GaussianDpEvent(noise))
    accountant.compose(sampled, releases.drawn)
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=256)
def noise_for(budget: float, delta: float, releases: Releases) -> float:
    """Return the least noise multiplier with which ``releases`` cost at most ``budget``, to one part in a thousand.

    Raises:
        PerfedError: no noise is enough.

    Example:
        >>> epsilon(noise_for(6.0, 1e-3, Releases(200)), Releases(200), 1e-3) <= 6
        True
    """
    low, high = 0.0, sqrt(releases.whole + releases.drawn) or 1.0
    while epsilon(high, releases, delta) > budget:
        low, high = high, 2 * high
        if high > _LARGEST_NOISE:
            raise PerfedError(f"privacy: no noise makes {releases.whole + releases.drawn} releases cost {budget:g}")
    while high - low > _EXACT * high:
        middle = (low + high) / 2
        low, high = (low, middle) if epsilon(middle, releases, delta) <= budget else (middle, high)
    return high
