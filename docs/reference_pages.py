"""Pages of reference made from the code: command line, settings, data sets, Python."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from markdown_tables import table
from pydantic import BaseModel
from site_text import cell, fields_of, one_line, settings, tables_in

import perfed
from perfed.cli import entry  # noqa: F401 - it adds all commands
from perfed.cli.app import app
from perfed.cli.index import fill_index, index
from perfed.experiment.build import KINDS
from perfed.experiment.config import Experiment
from perfed.method.method import Method
from perfed.participation.settings import table_fields

GROUPS = {
    "Who the clients are": ("Federation", "Client", "Split", "load", "datasets"),
    "Models": ("Model", "mlp", "cnn", "digits_cnn", "linear", "hidden_layer"),
    "Training": ("build_method", "Run", "Participation", "Clock", "Evaluation", "Callback", "use_workers"),
    "Experiments": ("validate", "start", "resume", "compare"),
    "What a run leaves": ("load_site", "metric"),
    "Methods and extensions of your own": (
        *("register", "Method", "Reply", "Extension", "weighted_mean", "PERSONAL", "SHARED"),
        *("method", "extensions", "placement", "aggregate", "registry"),
    ),
    "Errors": ("PerfedError",),
}
"""The public interface in the order of use; a test says that nothing is left out."""

_COMMANDS = """# Command line

For those who look up an option. Every command is here with its arguments, options and an example.
It is what `--help` prints. The page is made from the code. To find the right command: [at a glance](at-a-glance.md).
"""
_SETTINGS = """# Settings of an experiment

For those who write an experiment's TOML file, or change a value on the command line.
Every table and every key is here, with its default and what is allowed.
The page is made from the code, as are the messages that refuse a wrong value.

```toml
method = "fedpac"
rounds = 20

[data]
name = "digits"
clients = 5

[model]
body = { kind = "mlp", hidden = [32], out = 16 }
head = "linear"

[training]
lr = 3e-3
```

On the command line a key is `KEY=VALUE`, with the name of its table in front where it is not alone:
`rounds=5`, `training.lr=1e-2`.
A number that may be a *schedule* may also be a table:

```toml
[training]
lr = { kind = "cosine", start = 0.1, end = 0.01, rounds = 20 }
```
"""
_DATASETS = """# Data sets and experiments

For those who look for data to try something on. perfed ships these data sets and experiments.
Where files are needed, one command fetches them.
The page is made from the code. `perfed show NAME` says the same in a terminal.
"""
_PYTHON = """# Python

For those who call perfed from Python. These names are the public interface.
What is promised of them stands in the [changelog](../changelog.md).
Each is imported when it is asked for, so that `import perfed` is quick.
"""


def pages() -> dict[str, str]:
    """Pages by their paths in the site."""
    return {
        "reference/command-line.md": "\n\n".join([_COMMANDS, *_commands(typer.main.get_command(app), "perfed")]),
        "reference/settings.md": "\n\n".join([_SETTINGS, *_tables()]),
        "reference/datasets.md": "\n\n".join([_DATASETS, *_datasets()]),
        "reference/python.md": "\n\n".join([_PYTHON, *_python()]),
    }


def _commands(group: Any, path: str) -> Iterator[str]:
    for name, command in group.commands.items():
        own = f"{path} {name}"
        if hasattr(command, "commands"):
            yield from _commands(command, own)
            continue
        yield f"## {own}"
        yield _help(command.help or "")
        yield from _parameters(command, own)
        if command.epilog:
            yield f"{_help(command.epilog)}"


def _help(text: str) -> str:
    """A command's help: words that a terminal shows as they are, commands in code."""
    text = re.sub(r"(?<!`)'(perfed [^']+)'", r"`\1`", inspect.cleandoc(text))
    return re.sub(r"^(Examples?): (.+)$", r"\1: `\2`", text, flags=re.MULTILINE)


def _parameters(command: Any, path: str) -> Iterator[str]:
    context = typer.Context(command, info_name=path)
    texts = {name: mark.help or "" for name, mark in _marks(command.callback)}
    rows = []
    for parameter in command.get_params(context):
        if "--help" not in parameter.opts and not getattr(parameter, "hidden", False):
            record = parameter.get_help_record(context) or (parameter.human_readable_name, "")
            said = fill_index(getattr(parameter, "help", None) or texts.get(str(parameter.name), ""))
            default = parameter.get_default(context)
            shown = "" if default in (None, "", False, (), []) or callable(default) else f"`{cell(str(default))}`"
            rows.append((f"`{cell(record[0])}`", one_line(said), "needed" if parameter.required else shown))
    if rows:
        yield table(("argument, option", "meaning", "default"), rows)


def _marks(function: Any) -> Iterator[tuple[str, Any]]:
    for name, hint in getattr(function, "__annotations__", {}).items():
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, typer.models.ArgumentInfo):
                yield name, mark


def _tables() -> Iterator[str]:
    yield "## At the top"
    yield _fields(Experiment, without=("data", "model", "training", "methods"))
    yield "## data"
    yield "`[data]` has the data set's `name`, and its options: see [data sets](datasets.md)."
    yield "## model"
    yield "`[model]` has a stage each for `embedding`, `body` and `head`."
    yield "A stage is the name of a kind, or a table with `kind` and its parameters."
    yield table(("kind", "parameters", "what"), _kinds())
    yield '`kind = "module:function"` calls a function of yours.'
    yield "## training"
    yield "`[training]` holds for every method. `[methods.NAME]` has the same keys for one, and its own."
    yield "Those stand on the [method's page](../methods/index.md)."
    of_all = next(item for item in index()["methods"] if item["name"] == "fedavg")["settings"]
    yield settings({key: about for key, about in of_all.items() if key in Method.model_fields})
    for name, field in Experiment.model_fields.items():
        model = tables_in(field)
        if model is not None and name not in ("data", "model"):
            yield from _nested(name, model)


def _nested(path: str, model: type[BaseModel]) -> Iterator[str]:
    yield f"## {path}"
    yield one_line((inspect.getdoc(model) or "").partition("\n\n")[0])
    if rows := [*fields_of(model)]:
        yield table(("key", "default", "allowed", "meaning"), rows)
    for name, field in table_fields(model).items():
        if (inner := tables_in(field)) is not None:
            yield from _nested(f"{path}.{name}", inner)


def _fields(model: type[BaseModel], without: tuple[str, ...] = ()) -> str:
    rows = [row for row in fields_of(model) if row[0].strip("`") not in without]
    return table(("key", "default", "allowed", "meaning"), rows)


def _kinds() -> Iterator[tuple[str, str, str]]:
    for name, function in KINDS.items():
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "words"]
        shown = ", ".join(p.name if p.default is p.empty else f"{p.name} = {p.default!r}" for p in parameters)
        summary = (inspect.getdoc(function) or "").partition("\n")[0]
        yield f"`{name}`", f"`{shown}`" if shown else "", one_line(summary)


def _datasets() -> Iterator[str]:
    for item in index()["datasets"]:
        yield f"## {item['name']}"
        yield one_line(item["summary"]) + (f" {one_line(item['about'])}" if item["about"] else "")
        yield "\n".join(f"* {head}: {text}" for head, text in _facts(item) if text)
        yield settings(item["options"])
    rows = [(f"`{e['name']}`", one_line(e["summary"]), f"`{e['data']['name']}`") for e in index()["experiments"]]
    yield "## Experiments"
    yield "Each runs as it is: `perfed compare digits-label-skew --methods local,fedpac`."
    yield table(("experiment", "what", "data"), rows)


def _facts(item: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "task", item["task"]
    yield "source", one_line(item["paper"])
    yield "file", f"{', '.join(item['files'])} (`perfed data get {item['name']}`)" if item["files"] else ""
    yield "experiments", ", ".join(f"`{name}`" for name in item["experiments"])


def _python() -> Iterator[str]:
    for title, names in GROUPS.items():
        lines = [line for name in names for line in _documented(name)]
        yield f"## {title}"
        yield "\n".join(["```{eval-rst}", *lines, "```"])


def _documented(name: str) -> Iterator[str]:
    found, path = getattr(perfed, name), f"perfed.{name}"
    if inspect.ismodule(found):
        own = [n for n in found.__all__ if n not in perfed.__all__ and not inspect.ismodule(getattr(found, n))]
        yield from (f".. automodule:: {path}", f"   :members: {', '.join(own)}", "")
    elif inspect.isclass(found):
        yield from (f".. autoclass:: {path}", "   :members:", "")
    elif callable(found):
        yield from (f".. autofunction:: {path}", "")
    else:
        yield from (f".. py:data:: {path}", f"   :value: {found!r}", "")
