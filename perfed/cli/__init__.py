"""The command line: what ``perfed`` calls."""


def main() -> None:
    """``perfed``: :func:`perfed.cli.commands.main`, imported here: it reads what :mod:`perfed.cli.listing` writes."""
    from perfed.cli import commands

    commands.main()


__all__ = ["main"]
