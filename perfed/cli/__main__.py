"""``python -m perfed.cli``."""

from perfed.cli.commands import main

if __name__ == "__main__":
    main()
