"""What a newcomer writes: each wrong form is answered with the right one, and help is whole."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import EXPERIMENT, TINY, Outcome, perfed

from perfed.experiment.comparison import ComparisonSpec
from perfed.experiment.config import find_experiment
from perfed.experiment.overrides import override

OWN = '''
import numpy as np
import perfed
from perfed.datasets import dataset
from perfed.extensions import register_extension
from pydantic import Field

@perfed.register("{name}")
class Mine(perfed.build_method("fedavg").__class__):
    """A method of one's own (Somebody 2031)."""

    boldness: float = Field(0.25, ge=0, description="how far it goes")

@register_extension
class Calm(perfed.Extension):
    """Keeps calm."""

    name = "{name}-calm"
    strength: float = 0.5

@dataset("{name}-data")
def data(seed, data_dir, *, rows: int = 8) -> perfed.Federation:
    """Ones and nothing else."""
'''


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, forgotten) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return Path(tmp_path)


def refused(result: Outcome, *says: str) -> str:
    """Exit code 2 and one line that says all this."""
    assert result.code == 2 and result.err.startswith("perfed: ") and result.err.count("\n") == 1, result
    for text in says:
        assert text in result.err, result.err
    return result.err


# Settings with dashes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (("--rounds", "20"), "rounds=20"),
        (("--rounds=20",), "rounds=20"),
        (("--batch-size", "8"), "batch_size=8"),
        (("--samples_per_client", "16"), "samples_per_client=16"),
        (("--data.clients", "5"), "data.clients=5"),
        (("--methods.local.lr", "0.1"), "methods.local.lr=0.1"),
        (("--speeds", "fixed"), "speeds=fixed"),
        (("--targets", "[0.7, 0.8]"), "'targets=[0.7, 0.8]'"),
        (("--rounds",), "rounds=VALUE"),
        (("--rounds", "--json"), "rounds=VALUE"),
    ],
)
def test_a_setting_with_dashes_is_answered_with_its_form(written, meant):
    said = refused(perfed("run", EXPERIMENT, *written), f"No such option '{written[0].partition('=')[0]}'")
    assert said.rstrip().endswith(f"a setting has no dashes: {meant}")


def test_the_form_that_is_named_is_one_that_the_command_takes(here):
    said = refused(perfed("run", EXPERIMENT, *TINY, "--batch-size", "8"))
    form = shlex.split(said.partition("no dashes: ")[2])
    done = perfed("run", EXPERIMENT, *TINY, "--method", "local", *form, "--out", "out")
    assert done.code == 0 and json.loads(Path("out/summary.json").read_text())["settings"]["batch_size"] == 8


def test_every_key_that_a_bare_assignment_may_have_is_known_to_the_command_line():
    table = {"rounds": 1, "data": {"name": "digits"}, "model": {"head": "linear"}}
    for key in ("rounds", "dtype", "rate", "policy", "speeds", "communication", "every", "metrics", "clients"):
        override(table, [f"{key}=1"], ["fedavg"])  # it is a key
        refused(perfed("compare", "digits-label-skew", f"--{key}", "1"), f"{key}=1")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("compare", EXPERIMENT, "--seed", "3"), "--seeds"),
        (("run", EXPERIMENT, "--methods", "local"), "--method"),
        (("run", EXPERIMENT, "--data", "x"), "--data-dir"),
        (("list", "methods", "--rounds", "3"), "No such option"),
        (("run", EXPERIMENT, "--speed", "9"), "No such option"),
    ],
)
def test_other_options_are_answered_as_before(arguments, says):
    assert "no dashes" not in refused(perfed(*arguments), says)


# Lists of methods ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        (EXPERIMENT, "--methods", "local,", "fedrep"),
        (EXPERIMENT, "--methods", "local,", "fedrep", "rounds=1"),
        (EXPERIMENT, "--methods", "local", ",fedrep"),
        (EXPERIMENT, "--methods", "local", ",", "fedrep"),
        ("--methods", "local,", "fedrep", EXPERIMENT),
        (EXPERIMENT, "--methods", "Local,", "FedRep"),
    ],
)
@pytest.mark.parametrize("command", ["compare", "tune", "sweep"])
def test_a_list_with_a_space_is_answered_with_the_list_without(command, words):
    words = [*words, "--grid", "lr=1e-3"] if command == "tune" else [*words]
    if command == "sweep":
        words.insert(1 if words[0] == EXPERIMENT else len(words), "lr=1e-3,1e-2")
    names = "Local,FedRep" if "Local," in words else "local,fedrep"
    refused(perfed(command, *words), "a list has no spaces", f"--methods {names}")


def test_a_comma_at_the_end_is_no_mistake(here):
    done = perfed("compare", EXPERIMENT, *TINY, "--methods", "local,", "--out", "out")
    assert done.code == 0, done.err


@pytest.mark.parametrize("command", [("compare",), ("tune", "--grid", "lr=1e-3")])
@pytest.mark.parametrize(
    ("experiment", "methods"),
    [
        ("digits-label-skew", "local,fedpac,ditto"),
        (EXPERIMENT, "local,flic-class,hetfedrep"),
        ("feddar-synthetic", "local,feddar-sa,feddar-wa,fedrep"),
        ("flic-toy-linear", "local,flic-class,flic-hl"),
    ],
)
def test_without_methods_some_are_named_that_go_with_the_experiment(command, experiment, methods):
    said = refused(perfed(command[0], experiment, *command[1:]), "--methods: at least one is needed")
    assert f"such as --methods {methods};" in said and "perfed list methods" in said
    assert len(said) < 200
    table = override(find_experiment(experiment), ["data.clients=4"], methods.split(","))
    ComparisonSpec(table, methods.split(","), [0]).check_starts(0)


# Commands and help ---------------------------------------------------------------------------------------------


def commands() -> list[tuple[str, ...]]:
    """Every command, read from what the program says of itself."""
    listed = perfed("--help").out.partition("Commands:\n")[2]
    names = re.findall(r"^ {2}(\S+)", listed, flags=re.MULTILINE)
    assert len(names) >= 18
    return [(name,) for name in names] + [
        (group, name) for group in ("data", "site") if group in names for name in within(group)
    ]


def within(group: str) -> list[str]:
    """The commands of a group."""
    listed = perfed(group, "--help").out.partition("Commands:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^ {2}(\S+)", listed, flags=re.MULTILINE)
    assert len(found) >= 3
    return found


@pytest.mark.parametrize("written", ["train", "Compare", "fly"])
def test_an_unknown_command_is_answered_with_those_that_there_are(written):
    said = refused(perfed(written), f"No such command '{written}'")
    listed = said.partition("commands: ")[2].strip().split(", ")
    assert [(name,) for name in listed] == [command for command in commands() if len(command) == 1]
    assert ("did you mean 'compare'?" in said) == (written == "Compare")
    refused(perfed("data", "gett"), "No such command 'gett'", "did you mean 'get'?", "commands: ")


@pytest.mark.long
def test_help_has_whole_summaries_and_no_marks_of_markup():
    whole = perfed("--help")
    assert "..." not in whole.out.partition("Commands:")[2] and max(map(len, whole.out.splitlines())) <= 80
    for command in [(), *commands()]:
        said = perfed(*command, "--help")
        assert said.code == 0 and "\\" not in said.out, command
        if len(command) == 1:
            first = re.search(r"\n\n {2}(.+?)\n\n", said.out, flags=re.DOTALL)
            assert first is not None and " ".join(first[1].split()).rstrip(".") in whole.said.replace(".", ""), command


def test_help_says_what_each_argument_is():
    said = perfed("run", "--help").said
    assert re.search(r"(?i)experiment.* a shipped experiment \('perfed list experiments'\) or a \.toml file", said)
    assert "settings to change, e.g. rounds=5" in said and "[required]" in said


# Files of one's own --------------------------------------------------------------------------------------------


def test_a_method_a_term_and_a_data_set_of_ones_own_are_shown(here):
    (here / "mine_shown.py").write_text(OWN.format(name="bold"))
    method = perfed("show", "mine_shown:bold")
    assert method.code == 0, method.err
    assert method.said.startswith("mine_shown:bold (method): A method of one's own")
    assert (
        "paper: Somebody 2031" in method.said
        and "boldness = 0.25 (number >= 0, or schedule) how far it goes" in method.said
    )
    assert "settings that every method has:" in method.said
    assert "perfed compare digits-label-skew --methods local,mine_shown:bold" in method.said
    assert "strength = 0.5" in perfed("show", "mine_shown:bold-calm").said
    assert "rows = 8 (integer)" in perfed("show", "mine_shown:bold-data").said
    found = json.loads(perfed("show", "mine_shown:BOLD", "--json").out)
    assert list(found) == ["method"] and found["method"]["name"] == "mine_shown:bold"
    refused(perfed("show", "mine_shown:shy"), "'mine_shown:shy'", "it has: bold")
    refused(perfed("show", "nowhere_shown:bold"), "cannot import 'nowhere_shown'")
    refused(perfed("show", "sklearn:svc"), "scikit-learn's")


def test_a_method_under_a_policy_is_shown():
    said = perfed("show", "FedPAC+SRPFL").said
    assert "is: fedpac under the participation policy srpfl" in said


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_key_may_be_quoted_as_in_toml(here, quote):
    (here / "mine_quoted.py").write_text(OWN.format(name="my-bold"))
    key = f"methods.{quote}mine_quoted:my-bold{quote}"
    done = perfed(
        "run", EXPERIMENT, *TINY, "--method", "mine_quoted:my-bold", f"{key}.boldness=0.75",
        f"{key}.placement.embedding=personal", "--out", "out",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert json.loads(Path("out/summary.json").read_text())["settings"]["boldness"] == 0.75


def test_a_module_in_a_package_needs_the_quotes(here):
    (here / "mine_pack").mkdir()
    (here / "mine_pack" / "__init__.py").touch()
    (here / "mine_pack" / "inner.py").write_text(OWN.format(name="packed"))
    table = {"rounds": 1, "data": {"name": "digits"}, "model": {"head": "linear"}}
    made = override(table, ["methods.'mine_pack.inner:packed'.boldness=0.5"], ["mine_pack.inner:packed"])
    assert made["methods"] == {"mine_pack.inner:packed": {"boldness": 0.5}}
    for wrong in ("methods.'a.b=1", "methods..lr=1", "methods.a'b'.lr=1", ".lr=1"):
        refused(perfed("run", EXPERIMENT, wrong), f"'{wrong.rpartition('=')[0]}' is not a key")


# The first experiment ------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("own", [True, False])
def test_init_ends_with_the_command_that_comes_next(here, own):
    rng = np.random.default_rng(0)
    (here / "sites").mkdir()
    for number in range(3):
        frame = pd.DataFrame({"age": rng.normal(size=40), f"x{number if own else 0}": rng.normal(size=40)})
        frame.assign(ill=(frame["age"] > 0).astype(int)).to_csv(here / "sites" / f"s{number}.csv", index=False)
    made = perfed("init", "sites", "--target", "ill")
    _, _, last = made.out.replace("\\\n", "").partition("\nnext:\n  ")
    last, _, _ = last.partition("\n")
    assert re.match(r"perfed compare study\.toml --methods +local,", last)
    short = ("rounds=1", "plan.engine=stacked", "plan.threads=1")
    done = perfed(*shlex.split(last)[1:], *short, "--out", "out")
    assert done.code == 0, done.err
    assert len(list(Path("out").glob("*/seed-*/summary.json"))) == 5 * (last.count(",") + 1)
