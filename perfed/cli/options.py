"""Arguments and options that several commands share: single ones, and blocks of options."""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from perfed.cli import complete
from perfed.errors import PerfedError

ExperimentName = Annotated[
    str,
    typer.Argument(
        help="a shipped experiment ('perfed list experiments') or a .toml file", autocompletion=complete.experiments
    ),
]
Settings = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings to change, e.g. rounds=5")
]
ComparedOption = Annotated[
    str,
    typer.Option(
        "--methods",
        help="names separated by commas; models of scikit-learn: {baselines}",
        autocompletion=complete.several_methods,
    ),
]
SeedsOption = Annotated[str, typer.Option("--seeds", help="as in compare")]
DataOption = Annotated[Path | None, typer.Option("--data-dir", help="folder of data files, before PERFED_DATA")]
JsonOption = Annotated[bool, typer.Option("--json", help="print only JSON; everything else goes to standard error")]
FormatOption = Annotated[str, typer.Option("--format", help="onnx, pt2 or safetensors")]


TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust", help="run code in the directory, or in modules that it names; use it only if you trust who made it"
    ),
]


@dataclass(frozen=True)
class Training:
    """The options that are common to all commands that train, as the user gave them."""

    engine: Annotated[
        str | None,
        typer.Option(
            "--engine", help="one of: {engines} ; unless given, the experiment's", autocompletion=complete.engines
        ),
    ] = None
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", min=1, help="number of workers of --engine ray; by default the number of free cores or GPUs"
        ),
    ] = None
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address",
            metavar="HOST:PORT",
            help="a Ray cluster for --engine ray or --jobs, or 'auto'; without it, RAY_ADDRESS, or only this machine",
        ),
    ] = None
    device: Annotated[str | None, typer.Option("--device", help="'cpu', 'cuda', ... in place of the experiment's")] = (
        None
    )
    data_dir: DataOption = None
    out: Annotated[Path | None, typer.Option("--out", help="directory for results; runs/NAME-TIME if not given")] = None
    jobs: Annotated[
        int, typer.Option("--jobs", min=1, metavar="N", help="number of runs in parallel, each in a separate process")
    ] = 1
    trust: TrustOption = False

    @property
    def asked_engine(self) -> str | None:
        """The requested engine: ``ray`` with ``--workers``, or with ``--ray-address`` unless that is for ``--jobs``.

        Raises:
            PerfedError: ``--engine`` names another engine.
        """
        needs_ray = self.workers is not None or (self.ray_address is not None and self.jobs == 1)
        if needs_ray and self.engine not in (None, "ray"):
            raise PerfedError(f"--workers and --ray-address are of --engine ray (given: --engine {self.engine})")
        return "ray" if needs_ray else self.engine


@dataclass(frozen=True)
class Shown:
    """The options for the output of a command: JSON in place of text, all metrics, execution plans."""

    as_json: JsonOption = False
    all_metrics: Annotated[bool, typer.Option("--all-metrics", help="every metric, with more columns")] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="print execution plans too")] = False


@dataclass(frozen=True)
class Source:
    """The run and site of a model; with ``trust``, files and modules of the run may execute code."""

    directory: Annotated[Path, typer.Argument(help="a run's directory", autocompletion=complete.run_directories)]
    site: Annotated[str, typer.Option("--site", help="the client's id")]
    data_dir: DataOption = None
    trust: TrustOption = False


@dataclass(frozen=True)
class Files:
    """The paths of the files that ``perfed report`` writes; all but that of the report are optional."""

    latex: Annotated[Path | None, typer.Option("--latex", help="file for a LaTeX table (booktabs)")] = None
    csv: Annotated[Path | None, typer.Option("--csv", help="CSV file: a row per method and metric")] = None
    figures: Annotated[
        Path | None,
        typer.Option("--figures", help="folder for the figures as SVG, PDF and PNG, and a page that shows them"),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option("--out", help="HTML file; by default report.html in the directory, if there is one directory"),
    ] = None

    def check(self) -> None:
        """Refuse paths that cannot be written, before any file is written.

        Raises:
            PerfedError: the folder of a path does not exist, or there is a folder in place of a file or the reverse.
        """
        files = {"--out": self.out, "--latex": self.latex, "--csv": self.csv}
        for option, path in files.items():
            if path is not None and path.is_dir():
                raise PerfedError(f"{option} {path}: is a folder; give the name of a file")
        for option, path in {**files, "--figures": self.figures}.items():
            if path is not None and not path.parent.is_dir():
                raise PerfedError(f"{option} {path}: there is no folder {path.parent}")
        if self.figures is not None and self.figures.exists() and not self.figures.is_dir():
            raise PerfedError(f"--figures {self.figures}: is a file; give the name of a folder")


def check_new(file: Path) -> None:
    """Refuse a file that exists already, so that none is overwritten.

    Raises:
        PerfedError: the file exists.
    """
    if file.exists():
        raise PerfedError(f"{file}: exists already; choose another name")


_LONGEST = 50  # largest number of characters of a site's name in a file name


def file_name(site: str) -> str:
    """Return a file name for a site.

    Spaces, and characters and dots that are unsafe in file names, become ``_``. In the latter case a hash of the site's
    name is appended, so that sites whose names differ only in such characters have different files.
    """
    safe = re.sub(r"[^\w. -]|^\.+|\.+$", "_", site)[:_LONGEST]
    code = "" if safe == site else f"-{hashlib.sha256(site.encode()).hexdigest()[:8]}"
    return safe.replace(" ", "_") + code


def default_out(name: str) -> Path:
    """Return the directory for results without ``--out``: ``runs/`` with the name and the current time."""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def with_seed(settings: list[str] | None, seed: int | None) -> list[str]:
    """Return the settings, followed by that of ``--seed`` if it was given."""
    return [*(settings or []), *([] if seed is None else [f"seed={seed}"])]
