"""The command line, which the program ``perfed`` runs."""


def main() -> None:
    """Run the command line; imports :mod:`perfed.cli.entry`, which reads the output of :mod:`perfed.cli.listing`."""
    from perfed.cli import entry

    entry.main()


__all__ = ["main"]
