"""Detection of columns that a site has in another unit, from the counts, sums and squares that sites send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import median

from perfed.data.target_scale import Sums
from perfed.errors import shorten_list
from perfed.tables.kinds import split_words

_SEPARATION = 3.5  # a site differs if it is this many spreads of the other sites away from them
_LEAST_SPREAD = 0.15  # least spread of the logarithms of means between sites of one population
_CLOSE = log(1.3)  # largest deviation of a ratio of means from a unit's factor
_CLOSE_SPREAD = log(1.7)  # largest deviation of a ratio of standard deviations from a unit's factor
_STRANGE = 20.0  # ratio from which on a difference is reported without a known factor
_LARGE = 15.0  # factor from which on units of a substance are considered for any column name
_POWERS = "powers of ten"
_SHORT = 3  # words up to this many letters must be equal, longer ones need only begin alike
_FEWEST = 5  # rows of a site below which its mean says little
_CENTRED = 0.3  # mean over standard deviation below which only standard deviations are compared


@dataclass(frozen=True)
class Moments:
    """The mean and standard deviation of a column in the training rows of a site.

    Attributes:
        rows: the number of rows that hold a value.
        mean, std: the mean and standard deviation of these values.
    """

    rows: int
    mean: float
    std: float

    @classmethod
    def from_sums(cls, sums: Sums) -> Moments:
        """Return the moments of the first value in the sums that a site sends."""
        return cls(sums.number, sums.total[0] / sums.number, sqrt(sums.squares[0] / sums.number))


@dataclass(frozen=True)
class Conversion:
    """The conversion between two units of one quantity.

    Attributes:
        factor, offset: ``number_in_smaller_unit = factor * number_in_larger_unit + offset``.
        larger, smaller: the names of the two units.
        quantity: the name of the quantity.
        words: beginnings of words in the names of columns of this quantity; one of up to three letters is a whole
            word.
    """

    factor: float
    larger: str
    smaller: str
    quantity: str
    words: tuple[str, ...] = ()
    offset: float = 0.0

    def is_of(self, name: str) -> bool:
        """Return whether the name of a column suggests this quantity."""
        names = {*split_words(name), name.casefold()}  # the words of "FiO2" are "fi" and "o2"
        return any(
            word.startswith(start) if len(start) > _SHORT else word == start for word in names for start in self.words
        )


_HEIGHT = ("height", "größe", "length", "stature")
_TIME = ("duration", "time", "follow", "stay", "days", "hours", "months", "years", "los")
_PRESSURE = (
    "pressure",
    "pao2",
    "pco2",
    "paco2",
    "po2",
    "sbp",
    "dbp",
    "map",
    "bp",
    "abp",
    "trestbps",
    "systol",
    "diastol",
)
_BLOOD = ("haemoglobin", "hemoglobin", "hämoglobin", "hgb", "hb")
CONVERSIONS = (
    Conversion(88.42, "mg/dl", "µmol/l", "creatinine", ("crea", "krea", "scr")),
    Conversion(18.016, "mmol/l", "mg/dl", "glucose", ("gluc", "gluk", "sugar", "zucker", "blutzucker", "fbs", "bg")),
    Conversion(38.67, "mmol/l", "mg/dl", "cholesterol", ("chol", "hdl", "ldl")),
    Conversion(88.57, "mmol/l", "mg/dl", "triglycerides", ("trig", "tg")),
    Conversion(17.1, "mg/dl", "µmol/l", "bilirubin", ("bili",)),
    Conversion(59.48, "mg/dl", "µmol/l", "uric acid", ("uric", "urate", "harnsäure")),
    Conversion(2.801, "mmol/l", "mg/dl", "urea nitrogen", ("bun", "urea")),
    Conversion(6.006, "mmol/l", "mg/dl", "urea", ("urea", "harnstoff")),
    Conversion(4.008, "mmol/l", "mg/dl", "calcium", ("calc", "kalz", "ca")),
    Conversion(2.431, "mmol/l", "mg/dl", "magnesium", ("magn", "mg")),
    Conversion(3.097, "mmol/l", "mg/dl", "phosphate", ("phos",)),
    Conversion(9.008, "mmol/l", "mg/dl", "lactate", ("lact", "lakt")),
    Conversion(1.611, "mmol/l", "g/dl", "haemoglobin", _BLOOD),
    Conversion(10.0, "g/dl", "g/l", "haemoglobin or protein", (*_BLOOD, "albu", "protein")),
    Conversion(10.93, "%", "mmol/mol", "HbA1c", ("hba1c", "a1c"), offset=-23.5),
    Conversion(1.8, "°C", "°F", "temperature", ("temp",), offset=32.0),
    Conversion(2.2046, "kg", "lb", "weight", ("weight", "gewicht", "mass", "kg", "lb")),
    Conversion(28.35, "ounces", "g", "weight", ("weight", "mass", "dose")),
    Conversion(2.54, "inches", "cm", "length", (*_HEIGHT, "waist", "circumference", "size", "cm")),
    Conversion(30.48, "feet", "cm", "length", _HEIGHT),
    Conversion(39.37, "m", "inches", "length", _HEIGHT),
    Conversion(100.0, "m", "cm", "length", _HEIGHT),
    Conversion(7.5006, "kPa", "mmHg", "pressure", _PRESSURE),
    Conversion(12.0, "years", "months", "time", ("age", "alter", *_TIME)),
    Conversion(365.25, "years", "days", "time", ("age", "alter", *_TIME)),
    Conversion(30.44, "months", "days", "time", _TIME),
    Conversion(7.0, "weeks", "days", "time", ("gestation", *_TIME)),
    Conversion(24.0, "days", "hours", "time", _TIME),
    Conversion(60.0, "minutes", "seconds", "time", (*_TIME, "seconds", "minutes")),
    Conversion(4.184, "kcal", "kJ", "energy", ("energy", "calor", "kcal", "kj")),
    Conversion(1.609, "miles", "km", "distance", ("distance", "mileage", "speed")),
    Conversion(
        100.0, "fractions", "per cent", "shares", ("share", "fraction", "percent", "rate", "satur", "spo2", "fio2")
    ),
    *(Conversion(10.0**power, f"10^{power} of a unit", "that unit", _POWERS) for power in range(1, 10)),
)
"""The conversions that are considered; :meth:`Conversion.is_of` tells for which columns."""
_SUBSTANCES = [unit for unit in CONVERSIONS if unit.factor >= _LARGE and unit.larger in ("mg/dl", "mmol/l")]
"""The conversions that are considered if the name of a column suggests no quantity."""


@dataclass(frozen=True)
class _Difference:
    """The relation of a site's numbers to those of most other sites.

    Attributes:
        ratio: the larger mean over the smaller one (standard deviations in place of means near zero); ``None`` if the
            units have different zeros.
        larger: whether the site's numbers are the larger ones.
        conversion: the conversion between the two units; ``None`` if none is known.
    """

    ratio: float | None
    larger: bool
    conversion: Conversion | None


def describe_units(columns: Mapping[str, Mapping[str, Sums]], sources: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each column that some sites seem to have in another unit than most sites.

    Args:
        columns: the sums of each site, by the name of the column.
        sources: the name of each site in messages.
    """
    for name, sums in columns.items():
        moments = {site: Moments.from_sums(site_sums) for site, site_sums in sums.items()}
        different = _find_different_sites(name, moments)
        groups: dict[tuple[Conversion | None, bool], list[str]] = {}
        for site, difference in different.items():
            groups.setdefault((difference.conversion, difference.larger), []).append(site)
        for sites in groups.values():
            other_sites = [site for site in moments if site not in different]
            yield _describe_difference(name, different[sites[0]], sites, other_sites, moments, sources)


def _describe_difference(
    name: str,
    difference: _Difference,
    sites: Sequence[str],
    other_sites: Sequence[str],
    moments: Mapping[str, Moments],
    sources: Mapping[str, str],
) -> str:
    means = [f"{median(moments[site].mean for site in group):.3g}" for group in (sites, other_sites)]
    site_list = shorten_list([sources[site] for site in sites], 3)
    other_list = sources[other_sites[0]] if len(other_sites) == 1 else f"the other {len(other_sites)} sites"
    relation = "differs from"
    if difference.ratio is not None:
        relation = f"is about {difference.ratio:.3g} times {'as large as' if difference.larger else 'smaller than'} at"
    conversion = difference.conversion
    question = "is it in another unit there"
    if conversion is not None and conversion.is_of(name):
        units = [conversion.larger, conversion.smaller]
        question = "is it in {} there and in {} elsewhere".format(*(units[::-1] if difference.larger else units))
    elif conversion is not None:
        question += f" ({conversion.factor:.15g}"
        if conversion.quantity != _POWERS:
            question += f", as {conversion.larger} and {conversion.smaller} of {conversion.quantity}"
        question += ")"
    place = "at one of the two sites" if len(other_sites) == 1 and len(sites) == 1 else f"at {site_list}"
    means_text = f"means {means[0]} and {means[1]}"
    return f"column '{name}' at {site_list} {relation} {other_list} ({means_text}): {question}? Convert it {place}"


def _find_different_sites(name: str, moments: Mapping[str, Moments]) -> dict[str, _Difference]:
    """Return the sites whose numbers differ from those of most sites as numbers in another unit do."""
    usable = {site: values for site, values in moments.items() if values.std > 0 and values.rows >= _FEWEST}
    different = {}
    for site, site_moments in usable.items():
        other_moments = [usable[other_site] for other_site in usable if other_site != site]
        if other_moments and (difference := _compare_moments(name, site_moments, other_moments)) is not None:
            different[site] = difference
    if 2 * len(different) >= len(usable):  # the sites are two halves
        different = {site: difference for site, difference in different.items() if difference.larger}
    return different if 2 * len(different) <= len(usable) else {}


def _compare_moments(name: str, site: Moments, other_sites: Sequence[Moments]) -> _Difference | None:
    """Return the relation of a site's numbers to those of ``other_sites``; ``None`` if they may be in the same unit."""
    mean, std = median(moments.mean for moments in other_sites), median(moments.std for moments in other_sites)
    for conversion in CONVERSIONS:
        if conversion.offset and conversion.is_of(name):
            for forward in (True, False):
                if _fits_offset(conversion, site, Moments(0, mean, std), other_sites, forward=forward):
                    return _Difference(None, forward, conversion)
    centred = any(moments.mean < _CENTRED * moments.std for moments in (site, *other_sites))
    sizes = [moments.std if centred else moments.mean for moments in (site, *other_sites)]
    ratio, deviations = log(sizes[0] / median(sizes[1:])), log(site.std / std)
    spread = max(_LEAST_SPREAD, _robust_spread([log(size) for size in sizes[1:]]))
    # Among many sites of one population, some site is far from the others by chance; the threshold grows with them.
    if abs(ratio) < (_SEPARATION + 0.5 * log(max(1.0, len(other_sites) / 4))) * spread:
        return None
    fits: list[tuple[float, Conversion]] = []
    named = [conversion for conversion in CONVERSIONS if conversion.is_of(name)]
    powers_of_ten = [conversion for conversion in CONVERSIONS if conversion.quantity == _POWERS]
    for conversion in (*(named or _SUBSTANCES), *powers_of_ten) if ratio * deviations > 0 else ():
        factor = log(conversion.factor)
        misfits = abs(abs(ratio) - factor), abs(abs(deviations) - factor)
        tolerance, spread_tolerance = _CLOSE, _CLOSE_SPREAD
        if conversion in named:  # deviations of skewed columns vary more
            tolerance, spread_tolerance = 1.5 * _CLOSE, _CLOSE_SPREAD * (1 + min(1.0, std / abs(mean) if mean else 1.0))
        elif conversion not in powers_of_ten:
            tolerance = _CLOSE / 2
        if not conversion.offset and misfits[0] <= tolerance and misfits[1] <= spread_tolerance:
            fits.append((misfits[0] - tolerance, conversion))
    if fits:
        return _Difference(exp(abs(ratio)), ratio > 0, min(fits, key=lambda fit: fit[0])[1])
    strange = abs(ratio) > log(_STRANGE) and abs(ratio - deviations) <= _CLOSE
    return _Difference(exp(abs(ratio)), ratio > 0, None) if strange and not centred else None


def _fits_offset(
    conversion: Conversion, site: Moments, typical: Moments, other_sites: Sequence[Moments], *, forward: bool
) -> bool:
    """Return whether a conversion with an offset explains a site's moments, which differ from those of the others."""
    factor, offset = conversion.factor, conversion.offset
    mean, std = factor * typical.mean + offset, factor * typical.std
    if not forward:
        mean, std = (typical.mean - offset) / factor, typical.std / factor
    spread = max(typical.std, _robust_spread([moments.mean for moments in other_sites]))
    differs = abs(site.mean - typical.mean) > _SEPARATION * spread
    return differs and abs(site.mean - mean) <= 1.5 * std and abs(log(site.std / std)) <= _CLOSE_SPREAD


def _robust_spread(values: Sequence[float]) -> float:
    """Return a robust standard deviation: 1.48 times the median distance to the median."""
    middle = median(values)
    return 1.48 * median(abs(value - middle) for value in values)
