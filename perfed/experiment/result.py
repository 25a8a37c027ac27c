"""Comparisons in Python: several methods and seeds on a federation, and the results."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from perfed.datasets.catalogue import register_temporarily
from perfed.errors import PerfedError
from perfed.experiment.comparison import ComparisonSpec, Conclusion, federated
from perfed.experiment.config import to_canonical_names
from perfed.experiment.factory import open_run
from perfed.experiment.jobs import Execute, Jobs, execute_in_turn
from perfed.experiment.planned import check_methods
from perfed.experiment.rows import AnyRun
from perfed.experiment.search import Search, read_chosen
from perfed.experiment.study import Study, read_comparison
from perfed.experiment.worker import Source
from perfed.methods.titles import match_display_name
from perfed.report import write_report
from perfed.report.comparison import compare_with_reference
from perfed.run.directory import RunDirectory
from perfed.tables.problems import pandas


@dataclass(frozen=True, repr=False)
class ComparisonResult:
    """The result of :func:`compare`; without ``out``, its runs in ``path`` are deleted together with this object.

    Attributes:
        path: the comparison's directory, with the files of ``perfed compare``.
        methods, seeds: the methods and seeds that were run.
        failed: an error message for each run that failed.
    """

    path: Path
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    failed: tuple[str, ...]
    _source: Source
    _conclusion: Conclusion
    _folder: Any = field(default=None)  # the temporary folder

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(self.methods)} over seeds {', '.join(map(str, self.seeds))}>"

    @property
    def table(self) -> Any:
        """A pandas ``DataFrame`` with a row per metric and method: mean, spread, and difference to the ``reference``.

        The ``reference``, the ``difference`` and its 95 % interval from ``low`` to ``high`` are those of the verdict;
        ``interval_over`` names what the interval is computed over. Values are in the unit of the metric, accuracy as
        a fraction of 1; see :func:`perfed.report.comparison.compare_with_reference`.

        Raises:
            PerfedError: pandas is not installed; the message names the extra.
        """
        rows = [asdict(row) for row in compare_with_reference(self._conclusion.runs, self._conclusion.verdict)]
        for row in rows:
            difference = row.pop("difference") or {}
            row["seeds"] = len(row["seeds"])
            row |= {"reference": difference.get("reference"), "difference": difference.get("mean")}
            row |= {"low": difference.get("low"), "high": difference.get("high")}
            row["interval_over"] = None if row["low"] is None else difference["over"]
        return pandas().DataFrame(rows)

    @property
    def verdict(self) -> str:
        """One sentence per method and the warnings, on separate lines (:func:`perfed.report.verdict.verdict`).

        Failed runs are among the warnings. The text is empty if there is a single method.
        """
        return "\n".join(self._conclusion.sentences)

    def best(self, site: str) -> str:
        """Return the method with the best mean over the seeds at ``site``.

        Raises:
            PerfedError: nothing was measured at the site, or there is a single method.
        """
        if self._conclusion.verdict is None:
            raise PerfedError(f"{', '.join(self.methods)}: there is nothing to choose from")
        return self._conclusion.verdict.best(site)

    def report(self, path: Path | str) -> Path:
        """Write the report, one self-contained HTML file, and return its path."""
        title = str(read_comparison(self.path).table["name"])
        return write_report(self._conclusion.runs, Path(path), title=title, left_out=self._conclusion.failed)

    def run(self, method: str, seed: int) -> AnyRun:
        """Return a finished run, whose method ``site`` returns the model of a site (``run(...).site("north")``).

        Raises:
            PerfedError: there is no such run, or it failed; the message contains the reason.
        """
        name = match_display_name(method, self.methods)
        if name is None or seed not in self.seeds:
            raise PerfedError(f"there is no run of '{method}' with seed {seed} in {self!r}")
        for reason in self.failed:
            if reason.startswith(start := f"{name}, seed {seed}: "):
                raise PerfedError(f"{name} failed with seed {seed}: {reason.removeprefix(start)}")
        where = read_comparison(self.path).directory(name, seed)
        with register_temporarily(self._source):
            return open_run(where)


def compare(
    federation: Source,
    methods: Sequence[str] | Mapping[str, Mapping[str, Any]],
    *,
    model: Mapping[str, Any],
    rounds: int,
    seeds: Sequence[int] = (0, 1, 2),
    tune: Sequence[str] | None = None,
    out: Path | str | None = None,
    jobs: int = 1,
    **tables: Any,
) -> ComparisonResult:
    """Train several methods over several seeds on ``federation``, as ``perfed compare`` does.

    Args:
        federation: the clients, the same for every seed, or a function that returns the federation of a seed (for
            example another fold).
        methods: names of methods and of scikit-learn models (``sklearn:logistic``, ``pooled:logistic``), or a mapping
            from names to settings, such as ``{"local": {}, "ditto": {"lr": 1e-3}}``.
        model: the stages, as in the ``[model]`` table of an experiment.
        rounds: the number of training rounds.
        seeds: the seeds of the runs.
        tune: the axes of a grid, such as ``["lr=1e-3,1e-2"]``, from which the settings of each method are chosen first,
            as by ``perfed tune``. All methods then train without the validation samples that this needs: a quarter of
            each client's training samples, unless the client has validation samples. scikit-learn models are tuned on
            the same samples with as many tries.
        out: the directory for the runs; if not given, they are deleted together with the result.
        jobs: the number of runs in parallel, each in its own process. A script that gives more than one must do so
            under ``if __name__ == "__main__":``, and its methods and functions must be in a module.
        tables: any other keys of an experiment: ``training={"lr": 1e-2}``, ``evaluation={"metrics": ["log-loss"]}``,
            ``dtype="float64"``, ...

    Returns:
        The :class:`ComparisonResult`: ``table``, ``verdict``, ``report(path)``, ``best(site)``, ``run(method, seed)``.

    Raises:
        PerfedError: settings or data are not valid, ``out`` exists already, or no run could start.

    Example:
        >>> from perfed import load
        >>> clients = load("digits", {"clients": 4, "samples": 20}, seed=0)
        >>> result = compare(clients, ["local", "fedavg"], model={"head": "linear"}, rounds=2, seeds=[0])
        >>> print(result.verdict)  # doctest: +ELLIPSIS
        No method is ahead of Local; FedAvg ...
        >>> site = result.run(result.best("000"), 0).site("000")
        >>> site.predict(clients.clients[0].test.x[:5]).shape
        (5,)
    """
    names, numbers = check_methods(list(methods), "methods", baselines=True), list(seeds)
    if not numbers or len(set(numbers)) < len(numbers):
        raise PerfedError(f"seeds = {numbers}: at least one is needed, each once")
    stages, method_settings = _check_model_table(model), _read_method_settings(methods)
    table = to_canonical_names({**tables, "rounds": rounds, "model": stages, "methods": method_settings})
    if reserved := {"method", "seed", "data"} & tables.keys():
        raise PerfedError(f"{min(reserved)}: methods, seeds and the federation are given by their own arguments")
    parallel = Jobs(jobs, source=federation)
    execute: Execute = execute_in_turn if jobs == 1 else parallel
    folder = tempfile.TemporaryDirectory(prefix="perfed-") if out is None else None
    path = Path(out or "") if folder is None else Path(folder.name)
    with register_temporarily(federation) as data:
        table = {"name": data, **table, "data": {"name": data}}
        if tune and federated(names):
            RunDirectory.create(path)
            table = _tune_experiment(path / "tune", table, names, numbers, tune, execute)
        study = Study.create(path, ComparisonSpec(table, names, numbers))
        conclusions, failed = study.execute(execute=execute)
    all_methods, reasons = tuple(study.comparisons[""].methods), tuple(map(str, failed))
    return ComparisonResult(path, all_methods, tuple(numbers), reasons, federation, conclusions[""], folder)


def _check_model_table(model: Any) -> dict[str, Any]:
    if not isinstance(model, Mapping):
        raise PerfedError(f"model: must be a table of stages, such as {{'head': 'linear'}}, not {type(model).__name__}")
    return dict(model)


def _read_method_settings(methods: Sequence[str] | Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the settings by method, for the methods with settings.

    Raises:
        PerfedError: a scikit-learn model or a blend has settings.
    """
    settings = methods if isinstance(methods, Mapping) else {}
    for name in settings:
        if not federated([name]) and settings[name]:
            raise PerfedError(f"methods: {name} has no settings")
    return {name: dict(table) for name, table in settings.items() if table}


def _tune_experiment(
    path: Path, table: dict[str, Any], methods: list[str], seeds: list[int], grid: Sequence[str], execute: Execute
) -> dict[str, Any]:
    """Choose settings for each method by a search, and return the experiment with them and with the search's data."""
    search = Search.from_grid(ComparisonSpec(table, federated(methods), seeds), grid)
    Study.create(path, search).choose(execute=execute)
    return {**read_chosen(path), "data": search.held_out["data"]}
