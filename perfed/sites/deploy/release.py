"""The files from which the server and all sites install perfed: its wheel, and a list of everything else with hashes.

perfed is on no package index. A page that installed it by its name would install whatever somebody registers there
under this name.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from perfed.errors import PerfedError
from perfed.system import installed_version

LOCK = "requirements.lock"
"""Name of the list of packages, as ``make lock`` writes it."""
FOLDER = "release"
"""Folder of a deployment with the files of the release."""
_WHEELS = "perfed-*.whl"
_PINNED = re.compile(r"^[A-Za-z0-9][\w.-]*==\S+", re.MULTILINE)


@dataclass(frozen=True)
class Release:
    """A wheel of perfed and the list of the packages that it needs.

    Attributes:
        wheel, lock: contents of the two files; empty where the administrator adds the files later.
        wheel_name: name of the wheel's file.
    """

    wheel: bytes
    lock: bytes
    wheel_name: str

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the release in ``folder``, which holds one wheel of perfed and ``requirements.lock``.

        Raises:
            PerfedError: a file is missing or not readable, there are several wheels, or the list has packages without
                a version or without hashes.
        """
        wheels = sorted(folder.glob(_WHEELS))
        if len(wheels) != 1 or not (folder / LOCK).is_file():
            names = ", ".join(sorted(file.name for file in folder.iterdir())) if folder.is_dir() else "no such folder"
            raise PerfedError(
                f"--release {folder}: one {_WHEELS} and {LOCK} are needed ('make dist' and 'make lock' write them); "
                f"there is: {names or 'nothing'}"
            )
        try:
            release = cls(wheels[0].read_bytes(), (folder / LOCK).read_bytes(), wheels[0].name)
        except OSError as error:
            raise PerfedError(f"--release {folder}: cannot be read: {error.strerror}") from None
        text = release.lock.decode(errors="replace")
        packages = _PINNED.findall(text)
        lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("#", "--hash="))]
        if not packages or len(lines) != len(packages) or text.count("--hash=sha256:") < len(packages):
            raise PerfedError(f"{folder / LOCK}: every package needs a version and hashes, as 'make lock' writes them")
        return release

    @classmethod
    def of_deployment(cls, folder: Path) -> Self:
        """Return the release of the deployment in ``folder``, whose files may still have to be added.

        Raises:
            PerfedError: as :meth:`read`.
        """
        return cls.read(folder / FOLDER) if (folder / FOLDER).is_dir() else cls.to_be_added()

    @classmethod
    def to_be_added(cls) -> Self:
        """Return the release of this version of perfed, whose files the administrator adds by hand."""
        version = installed_version()
        return cls(b"", b"", f"perfed-{'VERSION' if version == 'unknown' else version}-py3-none-any.whl")

    @property
    def files(self) -> dict[str, bytes]:
        """The contents of the files by their names; nothing where they are added later."""
        return {self.wheel_name: self.wheel, LOCK: self.lock} if self.wheel else {}

    @property
    def rows(self) -> str:
        """The rows of a table of the files with their SHA-256."""
        unknown = "ask the server's administrator"
        hashes = {name: f"`{hashlib.sha256(content).hexdigest()}`" for name, content in self.files.items()}
        return "\n".join(f"| `{name}` | {hashes.get(name, unknown)} |" for name in (self.wheel_name, LOCK))
