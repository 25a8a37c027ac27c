"""The entry point of the command line: it runs commands, and turns errors into messages and exit codes."""

from __future__ import annotations

import gc
import io
import sys
from typing import NoReturn

import typer

from perfed.cli.app import app, no_such_option
from perfed.cli.console import CTRL_C, INTERRUPTED, Stopped, escape_controls
from perfed.errors import PerfedError
from perfed.plugins import IMPORTED, import_from_optional_packages, report_user_errors
from perfed.system import TERMINATED, exit_on_sigterm, is_sigterm_exit

# These modules add their commands in the order in which help lists them; optional packages add theirs at the end.
# isort: off
from perfed.cli import data_commands, original_commands, train_commands, result_commands  # noqa: F401
from perfed.cli import list_commands  # noqa: F401
# isort: on

import_from_optional_packages("commands")


def main() -> None:
    """Run the command line; user errors are printed as one line and exit with code 2."""
    gc.set_threshold(50_000)  # by default garbage collection takes a seventh of the time in which torch is imported
    IMPORTED.clear()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without the plus-minus sign
    try:
        with exit_on_sigterm(), report_user_errors():
            code = typer.main.get_command(app)(prog_name="perfed", standalone_mode=False)
    except Stopped as stopped:
        _exit_with_message(*stopped.args)
    except PerfedError as error:
        _exit_with_message(str(error), 2)
    except OSError as error:  # a full disk, a folder without permission
        _exit_with_message(f"{error.filename or 'file'}: {error.strerror or error}", 2)
    except MemoryError as error:
        _exit_with_message(f"not enough memory ({error})", 2)
    except KeyboardInterrupt:
        code = CTRL_C
    except SystemExit as stop:
        if is_sigterm_exit(stop):
            _exit_with_message(INTERRUPTED[TERMINATED], TERMINATED)
        raise
    except Exception as error:
        # Typer's own errors (an unknown option, a missing argument) come from click, which newer versions carry inside.
        if type(error).__name__ == "Abort":
            _exit_with_message(INTERRUPTED[CTRL_C], CTRL_C)
        if type(error).__name__ == "NoSuchOption" and (message := no_such_option(error, sys.argv)):
            _exit_with_message(message, 2)
        if hasattr(error, "format_message"):
            if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
                print(error.format_message())
                raise SystemExit(2) from None
            _exit_with_message(error.format_message(), 2)
        raise
    if code == CTRL_C:  # Typer turns Ctrl-C into this code
        _exit_with_message(INTERRUPTED[CTRL_C], CTRL_C)
    raise SystemExit(code if isinstance(code, int) else 0)


def _exit_with_message(message: str, code: int) -> NoReturn:
    print(f"perfed: {escape_controls(' '.join(message.split()))}", file=sys.stderr)
    raise SystemExit(code)
