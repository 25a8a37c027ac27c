r"""Names that come from data and hold what means something to TOML, Markdown or a terminal."""

from __future__ import annotations

import csv
import random
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import Outcome, perfed
from markdown_it import MarkdownIt

from perfed import Federation, PerfedError
from perfed.data.federation_schema import FederationSchema, SiteMetadata
from perfed.data.names import markdown_code, markdown_text, quote_name, quote_unless_plain
from perfed.experiment.init_template import check_settings, choose_split_and_columns, study_text

ACCEPTED = [
    "Age\n(years)",
    "Age\r\n(years)",
    "Age\t(years)",
    'age\nscales = "site"',
    'age\n\n[methods."module:X"]',
    'age\npreprocess = "module:NAME"\n[privacy]\nepsilon = 1e6',
    '"""age',
    "'''age",
    "age]",
    "# age",
    "age\\",
    "age\\u0022",
    "age\u2028scales = 1",
    "age\u2029scales = 1",
    "${age} $(age) `age` %n %i @{site}",
    "<img src=x onerror=alert(1)>",
    "| age |",
    "=1+1",
    "Größe 😀 \u200f",
]
REFUSED = ["age\x00", "age\x1b[2K", "age\x85x", "age\x0bx", "age\x7f", "\u202eega", "age\u2066x", "age\x9b"]
WORDS = ["\n", "\r\n", "\t", '"""', "'''", '"', "'", "]", "[x]", "[[x]]", "#", "\\", "\\n", "=", "{", "}", ",", ";"]
WORDS += ["\u2028", "\u2029", "\u200f", "é", "😀", "a", "b", " ", ":", ".", "%", "epsilon = 1", "scales", "`", "<b>"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(tmp_path)


def write_tables(folder: Path, *, column: str = "age", target: str = "ill", category: str = "m", label: str = "yes"):
    """Write the tables of two sites, with names from data in all four places."""
    folder.mkdir(exist_ok=True)
    for seed, site in enumerate(("north", "south")):
        draw = random.Random(seed)
        rows = [[draw.random(), draw.choice([category, "f"]), (label, "no")[i % 2]] for i in range(20)]
        with (folder / f"{site}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([[column, "sex", target], *rows])


def parse_settings(target: str) -> dict[str, object]:
    """The settings that the text of an experiment on the tables in ``t`` holds, and its lines that are no comments."""
    federation, settings = choose_split_and_columns({"files": ["t"], "target": target})
    return tomllib.loads(study_text("study", settings, federation))


def refused(result: Outcome) -> str:
    assert result.code == 2 and "Traceback" not in result.err and result.err.count("\n") == 1, result
    return result.err


@pytest.mark.parametrize("column", ACCEPTED)
def test_a_header_is_accepted_and_changes_no_setting(column):
    write_tables(Path("t"))
    expected = parse_settings("ill")
    write_tables(Path("t"), column=column)
    assert parse_settings("ill") == expected
    result = perfed("init", "t", "--target", "ill")
    assert result.code == 0, result.err
    text = Path("study.toml").read_text(encoding="utf-8")
    assert tomllib.loads(text) == expected
    assert all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize("seed", range(25))
def test_the_file_holds_what_it_was_written_for_whatever_the_names_are(seed):
    draw = random.Random(seed)
    column, target, category, label = ("x" + "".join(draw.choices(WORDS, k=8)).strip() for _ in range(4))
    write_tables(Path("t"))
    expected = parse_settings("ill")
    write_tables(Path("t"), column=f"{column}1", target=target, category=category, label=label)
    settings = parse_settings(target)
    assert settings.pop("data") == expected.pop("data") | {"target": target}
    assert settings == expected


@pytest.mark.parametrize("place", ["column", "target", "category", "label"])
@pytest.mark.parametrize("name", REFUSED)
def test_control_characters_are_refused_with_their_code(place, name):
    code = next(f"U+{ord(c):04X}" for c in name if c not in "agex[2K")
    frames = {}
    for site in ("north", "south"):
        names = {"column": "age", "target": "ill", "category": "m", "label": "yes"} | {place: name}
        rows = [[i / 7, ("f", names["category"])[i // 2 % 2], (names["label"], "no")[i % 2]] for i in range(20)]
        frames[site] = pd.DataFrame(rows, columns=[names["column"], "sex", names["target"]])
    target = name if place == "target" else "ill"
    with pytest.raises(PerfedError, match=rf"control character {code.replace('+', '[+]')}"):
        Federation.from_frames(frames, target=target)


@pytest.mark.parametrize("kind", ["site", "class", "domain", "column", "class name"])
def test_arrays_are_checked_too(kind):
    name, labels = "a\x00b", {}
    site = {"x_train": np.eye(4), "y_train": np.array(["m", "w", "m", "w"])}
    if kind == "class":
        site["y_train"] = np.array(["m", "a\x01b", "m", "w"])
        name = "a\x01b"
    elif kind == "class name":
        site["y_train"], labels = np.array([0, 1, 0, 1]), {"class_names": ("m", name)}
    elif kind == "domain":
        site["domain_train"], labels = np.array([0, 1, 0, 1]), {"domain_names": ("m", name)}
    elif kind == "column":
        site["feature_names"] = ["a", name, "c", "d"]
    with pytest.raises(PerfedError, match="control character"):
        Federation.from_arrays({name if kind == "site" else "north": site}, **labels)


@pytest.mark.parametrize("name", ["a\x00", "a\x1b", "\u202ea"])
def test_names_that_another_machine_sends_are_checked(name):
    values = {"task": "classification", "labels": "texts", "classes": ["b", name], "domains": None}
    values["classes"].sort()
    with pytest.raises(PerfedError, match="control character"):
        SiteMetadata.of_plain(values, "site 'north'")
    with pytest.raises(PerfedError, match="control character"):
        FederationSchema.of_plain({"task": "classification", "classes": values["classes"]}, "the server")


def test_a_line_break_in_the_name_of_the_experiment_is_refused():
    write_tables(Path("t"))
    assert "--out" in refused(perfed("init", "t", "--target", "ill", "--out", "a\nrounds = 1\n#.toml"))
    assert [file.name for file in Path().iterdir()] == ["t"]


@pytest.mark.long
def test_files_with_odd_names_are_sites_and_no_settings():
    write_tables(Path("t"))
    Path("t/north.csv").rename('t/north"]\nseed = 3 #.csv')
    result = perfed("init", 't/north"]\nseed = 3 #.csv', "t/south.csv", "--target", "ill")
    assert result.code == 0, result.err
    settings = tomllib.loads(Path("study.toml").read_text(encoding="utf-8"))
    assert settings["data"]["files"] == ['t/north"]\nseed = 3 #.csv', "t/south.csv"] and "seed" not in settings
    result = perfed("run", "study.toml", "rounds=1", "method=fedavg", "--out", "run")
    assert result.code == 0, result.err


@pytest.mark.parametrize("text", ["rounds = 3", "rounds = 2\nseed = 1", "rounds = ", "rounds = 2.0\nx = nan"])
def test_a_text_with_other_settings_is_refused(text):
    with pytest.raises(PerfedError, match="would not hold the settings"):
        check_settings(text, {"rounds": 2})
    check_settings("rounds = 2  # twice", {"rounds": 2})


@pytest.mark.parametrize("name", [*ACCEPTED, "", " a", "a, b", "\U0010ffff", "\ufeff"])
def test_quoted_names_come_back_from_toml(name):
    assert tomllib.loads(f"x = {quote_name(name)}") == {"x": name} and quote_name(name).isprintable()
    shown = quote_unless_plain(name)
    assert shown.isprintable() and (shown == quote_name(name) or (shown == name and not set(name) & set(',"\\')))


@pytest.mark.parametrize("name", ACCEPTED)
def test_markdown_shows_a_name_as_it_is(name):
    parser = MarkdownIt("gfm-like", {"html": True, "linkify": False})
    shown = "".join(c if c.isprintable() else f"\\u{ord(c):04X}" for c in " ".join(name.split()))
    for written, tag in ((markdown_text(name), "text"), (markdown_code(name), "code_inline")):
        (_, inline, _) = parser.parse(f"x {written} x")
        assert {token.type for token in inline.children} <= {"text", "text_special", tag}
        assert "".join(token.content for token in inline.children) == f"x {shown} x"
