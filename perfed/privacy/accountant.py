"""Privacy accounting: the epsilon of a number of Gaussian mechanisms, and the noise that keeps it within a budget."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from math import inf, sqrt

from perfed.errors import PerfedError
from perfed.system import extra_command

_LARGEST_NOISE = 1e5
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Releases:
    """The number of Gaussian mechanisms applied to one client's data.

    The noise of each has z times the standard deviation that one row (or the client) can change.

    Attributes:
        full: number of releases that always include the row.
        sampled: number of releases that include the row with probability ``rate``, drawn secretly and independently
            for each release (Poisson sampling).
        rate: sampling probability of the ``sampled`` releases.

    Example:
        >>> Releases(2) + Releases(3, sampled=10, rate=0.1)
        Releases(full=5, sampled=10, rate=0.1)
    """

    full: int = 0
    sampled: int = 0
    rate: float = 1.0

    def __add__(self, other: Releases) -> Releases:
        rates = {releases.rate for releases in (self, other) if releases.sampled}
        return Releases(self.full + other.full, self.sampled + other.sampled, max(rates, default=1.0))

    def repeat(self, count: int) -> Releases:
        """Return the releases of ``count`` repetitions."""
        return Releases(self.full * count, self.sampled * count, self.rate)


@lru_cache(maxsize=4096)
def compute_epsilon(noise: float, releases: Releases, delta: float) -> float:
    """Return the epsilon of ``releases`` with the noise multiplier ``noise`` at ``delta``.

    k adaptively composed Gaussian mechanisms with noise z are exactly as private as one with noise ``z / sqrt(k)``
    (Dong et al. 2022, corollary 2), whose epsilon has a closed form (Balle & Wang 2018, theorem 8). With Poisson
    sampling, the privacy losses are composed numerically (Koskela et al. 2020). dp-accounting computes both, for data
    sets that differ in the presence of one row (or client).

    Returns:
        0 without releases; infinity without noise.

    Raises:
        PerfedError: if dp-accounting is not installed.

    Example:
        >>> round(compute_epsilon(2.0, Releases(1), 1e-3), 3)
        1.352
    """
    if not (releases.full or releases.sampled):
        return 0.0
    if noise <= 0:
        return inf
    if find_spec("dp_accounting") is None:
        raise PerfedError(f"[privacy] needs dp-accounting: {extra_command('privacy')}")
    library = import_module("dp_accounting")
    if not releases.sampled:
        return float(library.get_epsilon_gaussian(noise / sqrt(releases.full), delta))
    accountant = import_module("dp_accounting.pld").PLDAccountant()
    if releases.full:
        accountant.compose(library.GaussianDpEvent(noise / sqrt(releases.full)))
    sampled_event = library.PoissonSampledDpEvent(releases.rate, library.GaussianDpEvent(noise))
    accountant.compose(sampled_event, releases.sampled)
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=256)
def find_noise_multiplier(budget: float, delta: float, releases: Releases) -> float:
    """Return the least noise multiplier with which ``releases`` cost at most ``budget``, to one part in a thousand.

    Args:
        budget: the largest permitted epsilon.
        delta: the delta at which epsilon is computed.
        releases: the mechanisms that share the budget.

    Raises:
        PerfedError: if no noise is enough.

    Example:
        >>> compute_epsilon(find_noise_multiplier(6.0, 1e-3, Releases(200)), Releases(200), 1e-3) <= 6
        True
    """
    low, high = 0.0, sqrt(releases.full + releases.sampled) or 1.0
    while compute_epsilon(high, releases, delta) > budget:
        low, high = high, 2 * high
        if high > _LARGEST_NOISE:
            raise PerfedError(
                f"privacy: no amount of noise keeps {releases.full + releases.sampled} releases within the budget "
                f"{budget:g}"
            )
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if compute_epsilon(middle, releases, delta) <= budget else (middle, high)
    return high
