"""Commands on shipped experiments that the documents show can be given: their options and settings are allowed."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from documents import PAGES, blocks

from perfed.cli import entry  # noqa: F401 - it adds all commands
from perfed.cli.app import app
from perfed.experiment.comparison import federated
from perfed.experiment.config import experiment_names, find_experiment, validate
from perfed.experiment.overrides import axis_of, override
from perfed.experiment.planned import parse_names, parse_seeds

ROOT = Path(__file__).parents[2]
SHOWN = re.compile(r"\bperfed (?:run|compare|sweep|tune|partition) [a-z][a-z0-9-]*(?= |`|\n|;)[^`\n;|>#]*")
OWN_MODULES = {
    "my_methods": (ROOT / "examples" / "my_methods.py").read_text(),
    "my_policies": blocks("docs/howto/policy.md", "python")[0],
    "my_kinds": blocks("docs/howto/robust.md", "python")[0],
}
COMMANDS: Any = typer.main.get_command(app)


def shown(document: str) -> list[str]:
    """The commands of a document, inline or in blocks, each on one line; what stands for several values left out."""
    text = (ROOT / document).read_text().replace("\\\n", " ")
    text = re.sub(r"(?<!`)`(?!`)[^`]*`", lambda quoted: quoted.group().replace("\n", " "), text)
    found = [re.sub(r"(--methods? )?\S*\.\.\.\S*", "", command).replace("$n", "10") for command in SHOWN.findall(text)]
    return [" ".join(shlex.quote(word) for word in shlex.split(command)) for command in dict.fromkeys(found)]


def lines_of(code: str) -> list[str]:
    """The commands of perfed in a block, each on one line."""
    return [line for line in code.replace("\\\n", " ").splitlines() if line.startswith("perfed ") and "..." not in line]


CASES = [
    (document, command)
    for document in PAGES
    for command in shown(document)
    if "METHOD" not in command and "rouns" not in command
]


def test_the_documents_show_commands():
    assert len(CASES) > 60 and {command.split()[1] for _, command in CASES} >= {"run", "compare", "sweep", "partition"}


@pytest.mark.parametrize(("document", "command"), CASES, ids=[f"{of}: {command}" for of, command in CASES])
def test_a_command_of_the_documents_can_be_given(document, command, tmp_path, monkeypatch, forgotten):
    for module, source in OWN_MODULES.items():
        if f"{module}:" in command:
            monkeypatch.syspath_prepend(tmp_path)
            monkeypatch.delitem(sys.modules, module, raising=False)
            (tmp_path / f"{module}.py").write_text(source)
    _, name, *words = shlex.split(command)
    given = COMMANDS.commands[name].make_context(name, words).params
    experiment, settings = given["experiment"], list(given["settings"] or ())
    assert experiment in experiment_names()
    chosen = given.get("methods") or given.get("method") or find_experiment(experiment)["method"]
    methods = federated(parse_names(chosen, baselines=True))
    parse_seeds(str(given.get("seeds") or 0))
    axes = [axis_of(axis) for axis in [*(given.get("grid") or ()), *filter(None, [given.get("axis")])]]
    for more in [[setting] for axis in axes for setting in axis] or [[]]:
        table = override(find_experiment(experiment), [*settings, *more], methods)
        for method in methods:
            validate({**table, "method": method, "seed": 0})


LINES = [(page, line) for page in PAGES for code in (*blocks(page), *blocks(page, "sh")) for line in lines_of(code)]


@pytest.mark.parametrize("page", sorted({page for page, _ in LINES}))
def test_commands_in_blocks_can_be_read(page):
    """Of every command, also on files that the reader has: it is there, and so are its options."""
    for line in (line for of, line in LINES if of == page):
        command, words = COMMANDS, shlex.split(line, comments=True)[1:]
        while hasattr(command, "commands") and words and not words[0].startswith("-"):
            assert words[0] in command.commands, line
            command, words = command.commands[words[0]], words[1:]
        command.make_parser(typer.Context(command)).parse_args(list(words))
