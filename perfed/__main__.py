"""The command line as a module: ``python -m perfed``."""

from perfed.cli import main

if __name__ == "__main__":
    main()
