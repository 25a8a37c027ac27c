"""What several commands take on the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from perfed.cli import complete
from perfed.errors import PerfedError


@dataclass(frozen=True)
class Workers:
    """Workers of ``--engine ray``: how many, and the address of their Ray, or of that of ``--jobs``; as given."""

    number: int | None = None
    address: str | None = None

    def engine(self, given: str | None, jobs: int = 1) -> str | None:
        """The engine: who asks for workers asks for Ray, unless it is for ``jobs`` side by side.

        Raises:
            PerfedError: another was given.
        """
        if self == Workers() or given == "ray" or (jobs > 1 and self.number is None):
            return given
        if given is not None:
            raise PerfedError(f"--workers and --ray-address are of --engine ray (given: --engine {given})")
        return "ray"


@dataclass(frozen=True)
class Training:
    """How a command that trains does it: options that all of these share, as they were given."""

    engine: str | None = None
    device: str | None = None
    data_dir: Path | None = None
    out: Path | None = None
    ray: Workers = Workers()
    jobs: int = 1


@dataclass(frozen=True)
class Shown:
    """What a command prints: JSON in place of text, all metrics, execution plans."""

    as_json: bool = False
    all_metrics: bool = False
    verbose: bool = False


def check_new(file: Path) -> None:
    """Whether ``file`` can be written without loss.

    Raises:
        PerfedError: it is there.
    """
    if file.exists():
        raise PerfedError(f"{file}: exists already; choose another name")


def file_name(site: str) -> str:
    """A site's name as that of a file."""
    return re.sub(r"[^\w.-]", "_", site)


ExperimentName = Annotated[
    str,
    typer.Argument(
        help="a shipped experiment ('perfed list experiments') or a .toml file", autocompletion=complete.experiments
    ),
]
Settings = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings to change, e.g. rounds=5")
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="one of: {engines} ; else the experiment's",
        autocompletion=complete.engines,
    ),
]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", min=1, help="of --engine ray; else as many as there are free cores or GPUs")
]
RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="HOST:PORT",
        help="a Ray cluster for --engine ray or --jobs, or 'auto'; else RAY_ADDRESS, or this machine alone",
    ),
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="'cpu', 'cuda', ... in place of the experiment's")]
DataOption = Annotated[Path | None, typer.Option("--data-dir", help="folder of data files, before PERFED_DATA")]
OutOption = Annotated[Path | None, typer.Option("--out", help="directory for results; runs/NAME-TIME if not given")]
JobsOption = Annotated[
    int, typer.Option("--jobs", min=1, metavar="N", help="runs side by side, each in a process of its own")
]
RunArgument = Annotated[Path, typer.Argument(help="a run's directory", autocompletion=complete.run_directories)]
SiteOption = Annotated[str, typer.Option("--site", help="the client's id")]
TrustOption = Annotated[
    bool, typer.Option("--trust", help="read files of a joined site that can run code: you know who made them")
]
MethodsOption = Annotated[
    str, typer.Option("--methods", help="names separated by commas", autocompletion=complete.several_methods)
]
ComparedOption = Annotated[
    str,
    typer.Option(
        "--methods",
        help="names separated by commas; models of scikit-learn: {baselines}",
        autocompletion=complete.several_methods,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON alone; all else goes to standard error")]
AllMetricsOption = Annotated[bool, typer.Option("--all-metrics", help="every metric, with more columns")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="print execution plans too")]
