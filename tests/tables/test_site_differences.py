"""Units and codes that differ between sites, found in counts, sums, squares and categories."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from data_files import require_file

from perfed import Federation
from perfed.data.target_scale import Sums
from perfed.tables.codes import match_texts
from perfed.tables.options import TableOptions
from perfed.tables.site_differences import describe_differences
from perfed.tables.site_rows import SiteTableData
from perfed.tables.units import describe_units

SITES = ("east", "north", "south", "west", "centre")

# By quantity: name of a column, typical mean and deviation, what a site makes of it, the two units.
UNITS: dict[str, tuple[str, float, float, float, float, str, str]] = {
    "creatinine": ("creatinine", 1.1, 0.5, 88.42, 0, "µmol/l", "mg/dl"),
    "glucose": ("Glucose", 110, 35, 1 / 18.016, 0, "mmol/l", "mg/dl"),
    "cholesterol": ("chol", 210, 45, 1 / 38.67, 0, "mmol/l", "mg/dl"),
    "haemoglobin": ("hb", 13.5, 1.8, 10, 0, "g/l", "g/dl"),
    "temperature": ("temp", 36.9, 0.7, 1.8, 32, "°F", "°C"),
    "temperature in °F": ("Temperature", 98.4, 1.3, 1 / 1.8, -32 / 1.8, "°C", "°F"),
    "weight": ("weight", 78, 15, 2.2046, 0, "lb", "kg"),
    "height": ("height", 170, 10, 1 / 2.54, 0, "inches", "cm"),
    "height in m": ("height", 170, 10, 0.01, 0, "m", "cm"),
    "saturation": ("saturation", 95, 3, 0.01, 0, "fractions", "per cent"),
    "age": ("age", 60, 14, 12, 0, "months", "years"),
}


def drawn(mean: float, std: float, seed: int, rows: int = 80, *, skewed: bool = False) -> np.ndarray:
    """Values of one population; sites' means differ by a tenth of a deviation or so."""
    rng = np.random.default_rng(seed)
    mean = mean + 0.15 * std * rng.normal()
    if skewed:
        sigma = np.sqrt(np.log1p((std / mean) ** 2))
        return rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, rows)
    return rng.normal(mean, std, rows)


def sums_of(values: dict[str, np.ndarray]) -> dict[str, Sums]:
    return {site: Sums.from_targets(torch.from_numpy(of_site)) for site, of_site in values.items()}


def lines(name: str, values: dict[str, np.ndarray]) -> list[str]:
    return list(describe_units({name: sums_of(values)}, {site: site for site in values}))


@pytest.mark.parametrize("odd", SITES)
@pytest.mark.parametrize("quantity", UNITS)
def test_the_one_site_with_another_unit_is_named_with_ratio_and_units(quantity, odd):
    name, mean, std, factor, offset, unit, usual = UNITS[quantity]
    values = {site: drawn(mean, std, seed) for seed, site in enumerate(SITES)}
    assert lines(name, values) == []
    ratio = (factor * values[odd].mean() + offset) / np.median([v.mean() for s, v in values.items() if s != odd])
    values[odd] = factor * values[odd] + offset
    (line,) = lines(name, values)
    how = (
        f"about {max(ratio, 1 / ratio):.3g} times {'as large as' if ratio > 1 else 'smaller than'} at the other 4 sites"
    )
    how = "differs from the other 4 sites" if offset else f"is {how}"
    assert line.startswith(f"column '{name}' at {odd} {how} (means ")
    assert line.endswith(f": is it in {unit} there and in {usual} elsewhere? Convert it at {odd}")


@pytest.mark.parametrize("power", [1, 2, 3, 6])
def test_powers_of_ten_are_found_whatever_a_column_is_called(power):
    values = {site: drawn(5, 2, seed, skewed=True) for seed, site in enumerate(SITES)}
    values["south"] = values["south"] / 10**power
    (line,) = lines("marker", values)
    assert "at south" in line and f"({10**power})" in line


def test_two_sites_in_another_unit_than_three_and_one_of_two():
    values = {site: drawn(1.1, 0.5, seed, skewed=True) for seed, site in enumerate(SITES)}
    for site in ("south", "west"):
        values[site] = 88.42 * values[site]
    (line,) = lines("creatinine", values)
    assert line.startswith("column 'creatinine' at south, west is about") and "at the other 3 sites" in line
    two = {site: values[site] for site in ("north", "south")}
    (line,) = lines("creatinine", two)
    assert "at south is about" in line and "at north" in line and line.endswith("Convert it at one of the two sites")


@pytest.mark.parametrize("shift", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("seed", range(3))
def test_populations_that_differ_are_no_other_unit(shift, seed):
    """Older patients, larger doses, more rows with a high value: a site whose mean is up to 1.5 deviations away."""
    for mean, std, skewed in ((60, 14, False), (5, 4, True), (1.1, 0.9, True), (0, 1, False)):
        values = {site: drawn(mean, std, 10 * seed + n, skewed=skewed) for n, site in enumerate(SITES)}
        values["south"] = values["south"] + shift * std
        assert lines("marker", values) == []


def test_real_sites_have_no_other_units():
    """Heart disease, 42 patients with Parkinson's disease, and four types of intensive care unit."""
    tables: list[dict[str, pd.DataFrame]] = []
    for file, sites in (("heart_disease.npz", "hospital"), ("parkinsons.npz", "patient"), ("icu_2012.npz", "icu_type")):
        with np.load(require_file(file)) as data:
            table = pd.DataFrame(data["x"].astype(float), columns=data["feature_names"])
            tables.append({str(site): table[data[sites] == site] for site in np.unique(data[sites])})
    found = []
    for frames in tables:
        for name in next(iter(frames.values())).columns:
            columns = {site: frame[name].dropna().to_numpy() for site, frame in frames.items()}
            columns = {site: column for site, column in columns.items() if len(column) >= 5}
            if name not in ("chol", "ca", "slope", "thal", "Height"):  # of these, sites have 0, or slips, for missing
                found += lines(name, columns)
    assert found == []


# Codes -------------------------------------------------------------------------------------------------------------


def ward(seed: int, rows: int = 80, **more: Any) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    columns = {
        "sex": rng.choice(["F", "M"], rows),
        "smoker": rng.integers(0, 2, rows),
        "stage": rng.choice(["none", "mild", "severe"], rows),
        "crea": rng.lognormal(0, 0.4, rows),
        "ill": rng.choice(["no", "yes"], rows),
    }
    return pd.DataFrame({**columns, **more})


def five(site: str = "", column: str = "", codes: dict[Any, Any] | None = None) -> dict[str, pd.DataFrame]:
    """Sites of which one writes a column in another way."""
    frames = {name: ward(seed) for seed, name in enumerate(SITES)}
    if codes is not None:
        frames[site] = frames[site].assign(**{column: frames[site][column].map(codes)})
    return frames


def doubts(frames: dict[str, pd.DataFrame], **options: Any) -> list[str]:
    made = Federation.from_frames(frames, target="ill", columns="named", task="classification", **options)
    return list(made.notes["doubts"])


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize(
    ("column", "codes"),
    [
        ("sex", {"F": "female", "M": "male"}),
        ("sex", {"F": "weiblich", "M": "männlich"}),
        ("sex", {"F": "f", "M": "m"}),
        ("stage", {"none": "NONE ", "mild": "MILD", "severe": "sev"}),
        ("ill", {"no": "nein", "yes": "ja"}),
        ("ill", {"no": "No", "yes": "Yes"}),
    ],
)
def test_the_one_site_with_other_codes_is_named_and_the_mapping_makes_it_agree(site, column, codes):
    (line,) = doubts(five(site, column, codes))
    assert line.startswith(f"column '{column}': ") and f"at {site} and" in line
    mapping = {str(new).strip(): old for old, new in codes.items() if str(new).strip() != old}
    assert all(f'{new} = "{old}"' in line or f'"{new}" = "{old}"' in line for new, old in mapping.items())
    assert doubts(five(site, column, codes), values={column: mapping}) == []


@pytest.mark.long
def test_codes_without_a_likeness_are_said_without_a_mapping():
    (line,) = doubts(five("south", "stage", {"none": "keine", "mild": "leicht", "severe": "schwer"}))
    assert line.startswith("column 'stage' at south holds 'keine', 'leicht', 'schwer', none of which the other 4 sites")
    (line,) = doubts(five("south", "ill", {"no": "gesund", "yes": "krank"}))
    assert line.startswith("column 'ill' at south holds 'gesund', 'krank', none of which the other 4 sites have")


def test_one_and_two_in_place_of_zero_and_one():
    (line,) = doubts(five("west", "smoker", {0: 1, 1: 2}))
    assert line == (
        "column 'smoker' at west holds 1 and 2, and 0 and 1 at 4 other sites; if they mean the same, recode it at west"
    )


@pytest.mark.long
def test_sites_that_agree_or_have_names_of_their_own_are_not_asked_about():
    assert doubts(five()) == []
    wards = {site: frame.assign(ward=[f"{site} {n % 3}" for n in range(80)]) for site, frame in five().items()}
    assert doubts(wards) == []
    rare = five()
    rare["south"]["stage"] = "mild"
    assert doubts(rare) == []


@pytest.mark.parametrize("pair", [("A", "AB"), ("type 1", "type 10"), ("married", "male"), ("1", "10"), ("I21", "I25")])
def test_codes_that_are_different(pair):
    assert match_texts(*pair) is None or pair == ("A", "AB")  # which is asked about where no site has both
    frames = {site: ward(seed, code=[pair[n % 2] for n in range(80)]) for seed, site in enumerate(SITES)}
    assert doubts(frames) == []


def test_labels_that_are_numbers_at_one_site_name_that_site():
    with pytest.raises(
        ValueError, match=r"site 'south': column 'ill', the target, holds numbers; others' .* are texts"
    ):
        doubts(five("south", "ill", {"no": 0, "yes": 1}))


def test_what_sites_send_is_enough():
    """The same lines from the messages of real sites, which tell only frequent categories."""
    frames = five("south", "sex", {"F": "female", "M": "male"})
    frames["west"]["crea"] *= 88.42
    options = TableOptions("ill", columns="named", task="classification")
    sites = {name: SiteTableData.alone(name, frame, options) for name, frame in frames.items()}
    sent = describe_differences({name: site.create_metadata(5) for name, site in sites.items()}, "ill")
    assert sent == doubts(frames) and len(sent) == 2
    assert describe_differences(
        {name: site.create_metadata(5) for name, site in sites.items()}, "ill", {s: f"{s}.csv" for s in sites}
    )[0].startswith("column 'crea' at west.csv is about")


def test_a_target_in_another_unit_is_named():
    frames = {name: ward(seed, days=np.random.default_rng(seed).gamma(9, 2, 80)) for seed, name in enumerate(SITES)}
    frames["north"]["days"] *= 24
    made = Federation.from_frames(frames, target="days", columns="named")
    (line,) = made.notes["doubts"]
    assert line.startswith("column 'days' at north is about") and "in hours there and in days elsewhere" in line
