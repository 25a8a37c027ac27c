"""A study on tables, and ``perfed deploy`` of it."""

from __future__ import annotations

import stat
from pathlib import Path

from command_line import Outcome, perfed

STUDY = """\
name = "Heart study"
description = "Who has heart disease."
method = "flic-hl"
rounds = 5

[data]
name = "tables"
files = ["/home/somebody/hospitals"]
target = "disease"
drop = ["patient"]

[model]
embedding = { kind = "linear", out = 4 }
body = { kind = "hidden-layer", out = 4 }
head = "linear"

[methods.flic-hl]
pretrain_epochs = 1
"""
SITES = ("north", "south", "west")


def study(folder: Path, *replaced: tuple[str, str]) -> Path:
    """The study as a file; its method may be another, or anything else."""
    text = STUDY
    for before, after in replaced:
        assert before in text
        text = text.replace(before, after)
    file = folder / "study.toml"
    file.write_text(text)
    return file


def deploy(file: Path, out: Path, *options: object) -> Outcome:
    """``perfed deploy`` to the three sites."""
    return perfed("deploy", file, "--sites", ",".join(SITES), "--out", out, *options)


def deployed(folder: Path, *options: object) -> Path:
    """The directory of a deployment that must succeed."""
    done = deploy(study(folder), folder / "deployment", *options)
    assert done.code == 0, done.err
    return folder / "deployment"


def open_to_others(folder: Path) -> dict[str, str]:
    """Modes of files and folders, ``folder`` too, that others than their user may read, write or enter."""
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    return {path.relative_to(folder).as_posix(): oct(mode) for path, mode in modes.items() if mode & 0o077}
