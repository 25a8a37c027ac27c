"""The Typer application to which all commands are added: shared blocks of options, complete help texts and errors."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import partial, wraps
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from perfed.cli.console import console
from perfed.cli.index import fill_index, index
from perfed.errors import PerfedError, suggest_name
from perfed.system import installed_version

_OPTIONS_INSTEAD = ("method", "seed")  # commands that lack these options have others instead, such as --methods
_TABLES = ("data", "model", "training", "participation", "clock", "evaluation", "snapshots", "blend", "methods", "plan")


class Command(TyperCommand):
    """A command whose help describes every argument, without markup."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        self._fill_text()
        texts = _collect_argument_texts(self.callback)
        for kind, title in (("argument", "Arguments"), ("option", "Options")):
            parameters = [parameter for parameter in self.get_params(ctx) if parameter.param_type_name == kind]
            if rows := [
                row
                for parameter in parameters
                if (row := _format_row(parameter, ctx, texts.get(str(parameter.name), "")))
            ]:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return the completions of ``incomplete`` for a shell, with the help of options."""
        self._fill_text()
        return super().shell_complete(ctx, incomplete)

    def _fill_text(self) -> None:
        """Fill the names of engines and baselines into the help when it is shown, since listing them takes time."""
        for parameter in self.params:
            if help_ := getattr(parameter, "help", None):
                parameter.help = fill_index(help_)


class Commands(TyperGroup):
    """A group of commands whose help shows complete summaries, and whose error for an unknown command lists them."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each command with its summary, over as many lines as it needs."""
        rows = [(name, str(command.help).partition("\n")[0]) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names.

        Raises:
            PerfedError: if there is no such command; lists the commands.
        """
        names = list(self.commands)
        if args[0] not in names and not args[0].startswith("-") and not ctx.resilient_parsing:
            hint = suggest_name(args[0].casefold(), names)
            raise PerfedError(f"No such command '{args[0]}'{hint}; commands: {', '.join(names)}")
        return super().resolve_command(ctx, args)


class App(typer.Typer):
    """A Typer application whose commands accept blocks of options."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=Commands, rich_markup_mode=None, pretty_exceptions_enable=False, **settings)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """Return a decorator for the function of a command, which may have :class:`blocks <Without>` of options."""
        decorate = super().command(name, cls=Command, **options)
        return lambda function: decorate(_with_blocks(function))


class Without:
    """A mark that names the options of a block that a command does not have: ``Annotated[Block, Without("jobs")]``.

    A block is a dataclass whose fields are options, each with its default: a command takes it as one parameter.
    """

    def __init__(self, *names: str) -> None:
        self.names = names


def _with_blocks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with a signature in which each block is replaced by its options."""
    hints, blocks = get_type_hints(function, include_extras=True), dict[str, tuple[type, list[str]]]()
    options: list[tuple[str, Any, Any]] = []  # name, default and type
    for name, parameter in inspect.signature(function).parameters.items():
        block, *marks = get_args(hints[name]) or (hints[name],)
        if isinstance(block, type) and is_dataclass(block):
            left_out = {option for mark in marks for option in mark.names}
            option_hints, block_fields = (
                get_type_hints(block, include_extras=True),
                [f for f in fields(block) if f.name not in left_out],
            )
            blocks[name] = block, [field.name for field in block_fields]
            options += [
                (f.name, parameter.empty if f.default is MISSING else f.default, option_hints[f.name])
                for f in block_fields
            ]
        else:
            options.append((name, parameter.default, hints[name]))

    @wraps(function)
    def command(**arguments: Any) -> Any:
        for name, (block, names) in blocks.items():
            arguments[name] = block(**{option: arguments.pop(option) for option in names})
        return function(**arguments)

    create_parameter = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    command.__signature__ = inspect.Signature([create_parameter(n, default=d, annotation=a) for n, d, a in options])  # type: ignore[attr-defined]
    command.__annotations__ = {name: annotation for name, _, annotation in options}
    return command


app = App(
    no_args_is_help=True,
    help="Personalised federated learning: run, compare and tune methods on clients that differ.",
)


def _print_version(requested: bool) -> None:
    if requested:
        console.print(f"perfed {installed_version()}")
        raise typer.Exit


@app.callback()
def _add_common_options(
    version: Annotated[
        bool, typer.Option("--version", help="print the version and stop", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _collect_argument_texts(function: Callable[..., Any] | None) -> dict[str, str]:
    """Return the help text of each argument of a command, by name."""
    hints = get_type_hints(function, include_extras=True) if function is not None else {}
    marks = {name: mark for name, hint in hints.items() for mark in get_args(hint)}
    return {name: mark.help or "" for name, mark in marks.items() if isinstance(mark, typer.models.ArgumentInfo)}


def _format_row(parameter: Any, ctx: Any, text: str) -> tuple[str, str] | None:
    """Return name and help of a parameter; Typer before 0.21 omits the ``text`` of arguments and escapes brackets."""
    record = parameter.get_help_record(ctx)
    if record is None:
        return None
    name, description = record[0], record[1].replace("\\[", "[")
    return name, description if text in description else f"{text}  {description}".rstrip()


def no_such_option(error: Any, words: Sequence[str]) -> str | None:
    """Return a message for an unknown option that is a setting with dashes; ``None`` for any other unknown option.

    ``error``: Typer's error about the option. ``words``: the command line.
    """
    option, command = str(getattr(error, "option_name", "")), getattr(error.ctx, "command", None)
    takes_settings = any(parameter.name == "settings" for parameter in getattr(command, "params", ()))
    key = option.lstrip("-").replace("-", "_")
    if not takes_settings or not _is_setting(key):
        return None
    position = next((number for number, word in enumerate(words) if word.partition("=")[0] == option), len(words))
    following = [*words[position : position + 2], "", ""]
    _, equals, value = following[0].partition("=")
    if not equals:
        value = following[1] if following[1] and not following[1].startswith("--") else "VALUE"
    return f"No such option '{option}'; a setting has no dashes: {shlex.quote(f'{key}={value}')}"


def _is_setting(key: str) -> bool:
    first, dot, _ = key.partition(".")
    if dot:
        return first in _TABLES
    tables = (
        item.get("settings") or item.get("options")
        for list_name in ("methods", "datasets", "extensions")
        for item in index()[list_name]
    )
    keys = {*index()["settings"], *(name for settings in tables for name in settings)}
    return key in keys and key not in (*_TABLES, *_OPTIONS_INSTEAD)
