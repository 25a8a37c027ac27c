"""The command line as a module: ``python -m perfed``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts the working directory first, where any file could take the place of an installed module.
    if sys.path and Path(sys.path[0]).resolve() == Path.cwd():
        del sys.path[0]
    from perfed.cli import main

    main()
