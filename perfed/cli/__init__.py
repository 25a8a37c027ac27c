"""The command line: what ``perfed`` calls."""


def main() -> None:
    """``perfed``: :func:`perfed.cli.entry.main`, imported here: it reads what :mod:`perfed.cli.listing` writes."""
    from perfed.cli import entry

    entry.main()


__all__ = ["main"]
