"""A wheel has what ``perfed list``, help and completion say, so that nobody waits for it at first use."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ListsHook(BuildHookInterface):
    """Put the output of :mod:`perfed.cli.listing` into a wheel as ``perfed/cli/index.json``."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make the file; a checkout in editable mode makes its own, which follows its sources."""
        if version == "editable":
            return
        if find_spec("torch") is None:
            self.app.display_warning("no torch here: perfed list and --help will take seconds at first use")
            return
        self.folder = tempfile.TemporaryDirectory()
        file = Path(self.folder.name) / "index.json"
        command = [sys.executable, "-P", "-m", "perfed.cli.listing"]
        with file.open("wb") as out:
            subprocess.run(command, env={**os.environ, "PYTHONPATH": self.root}, stdout=out, check=True)
        build_data["force_include"][str(file)] = "perfed/cli/index.json"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what only the wheel needs."""
        if hasattr(self, "folder"):
            self.folder.cleanup()
