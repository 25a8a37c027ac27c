"""Functions that the commands that train share: they parse requests, execute runs and print results.

The commands import this module when they run, because it imports torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from perfed.cli.console import CTRL_C, INTERRUPTED, Stopped, reserve_stdout, say, say_where, say_whole
from perfed.cli.options import Shown, Training
from perfed.cli.progress import Work, show_progress
from perfed.cli.terminal import print_board, print_choice, print_conclusion, print_parts, print_run, say_outcome
from perfed.engine.ray.where import use_workers
from perfed.errors import PerfedError
from perfed.experiment.comparison import ComparisonSpec, Conclusion, Resources, federated
from perfed.experiment.config import Experiment, find_experiment, validate
from perfed.experiment.estimators import is_baseline
from perfed.experiment.factory import Key, RunFactory
from perfed.experiment.jobs import Execute, Jobs, Outcomes, execute_in_turn
from perfed.experiment.leaderboard import conclude_leaderboard, run_leaderboard
from perfed.experiment.overrides import override, parse_value
from perfed.experiment.planned import parse_names, parse_seeds, suggest_methods
from perfed.experiment.start import is_done, resume
from perfed.experiment.study import Planned, Study, extend
from perfed.method.registry import method_id
from perfed.methods.titles import display_name
from perfed.plugins import BLEND, IMPORTED, list_modules, refuse_modules
from perfed.report import load_runs, write_report
from perfed.report.against import needs_no_federation
from perfed.run.directory import RunDirectory
from perfed.run.run import Run
from perfed.system import TERMINATED, is_sigterm_exit
from perfed.training.plan import ENGINES, open_device

WORSE = 3
"""Exit code of ``--fail-if-worse-than-local`` if a federated method is worse than the best that needs no federation."""

# Requests -------------------------------------------------------------------------------------------------


def device_of(how: Training) -> torch.device | None:
    """Return the device that ``--device`` names; ``None`` without this option."""
    return None if how.device is None else open_device(how.device, f"--device {how.device}")


def resources_of(how: Training) -> Resources:
    """Return the data folder, the device and the trust with which runs are created."""
    return Resources(how.data_dir, device_of(how), how.trust)


def settings_of(how: Training, settings: Sequence[str] | None) -> list[str]:
    """Return the settings together with that of the requested engine."""
    engine = how.asked_engine
    if engine is not None and engine not in ENGINES:
        raise PerfedError(f"--engine {engine}: unknown engine; allowed: {', '.join(ENGINES)}")
    return [*(settings or []), *([f'plan.engine="{engine}"'] if engine else [])]


def shared_settings(how: Training, settings: Sequence[str] | None) -> list[str]:
    """Return the settings of a command for several methods and seeds; refuse settings of method and seed."""
    for assignment in settings or []:
        if assignment.partition("=")[0].strip() in ("method", "seed"):
            raise PerfedError(f"'{assignment}': methods and seeds are given with --methods and --seeds here")
    return settings_of(how, settings)


def chosen_experiment(name: str, settings: Sequence[str]) -> Experiment:
    """Return the experiment ``name`` with the ``settings`` of one method and seed."""
    table = find_experiment(name)
    # Settings of this method, the last that is named, need no prefix.
    methods = [text.removeprefix("method=") for text in settings if text.startswith("method=")]
    method = method_id(str(parse_value(methods[-1])) if methods else method_in(table))
    return validate(override(table, settings, [method]))


def method_in(table: dict[str, Any]) -> str:
    """Return the method of an experiment."""
    return str(table.get("method", Experiment.model_fields["method"].default))


def asked_comparison(
    experiment: str,
    settings: Sequence[str] | None,
    methods: str,
    seeds: str,
    how: Training,
    *,
    baselines: bool = True,
) -> ComparisonSpec:
    """Return the comparison of ``--methods`` over ``--seeds`` on an experiment with ``settings``.

    Raises:
        PerfedError: an argument is wrong, or no method is named; the message suggests methods.
    """
    check_one_word(methods, [experiment, *(settings or [])])
    table = find_experiment(experiment)
    if not methods.strip(" ,"):
        examples = ",".join(suggest_methods(table))
        raise PerfedError(
            f"--methods: at least one is needed, such as --methods {examples}; 'perfed list methods' names all"
        )
    names, numbers = parse_names(methods, baselines=baselines), parse_seeds(seeds)
    return ComparisonSpec(override(table, shared_settings(how, settings), federated(names)), names, numbers)


def with_blend(methods: str) -> str:
    """Return ``--methods`` followed by the row ``blend``, unless they are empty or contain it."""
    names = [name.strip() for name in methods.split(",") if name.strip()]
    return methods if not names or BLEND in names else ",".join([*names, BLEND])


def check_one_word(text: str, words: Sequence[str | None]) -> None:
    """Refuse a list of methods that a shell has divided at its spaces.

    Args:
        text: the value of ``--methods``.
        words: the arguments of the command: the experiment and settings.

    Raises:
        PerfedError: ``words`` contains the rest of the list; the message has the corrected list.
    """
    loose = [word for word in words if word and "=" not in word]
    if text.rstrip().endswith(",") or any(word.startswith(",") for word in loose):
        stray_methods = [name for word in loose for name in word.split(",") if _is_method(name)]
        corrected = ",".join([*(name.strip() for name in text.split(",") if name.strip()), *stray_methods])
        if stray_methods:
            raise PerfedError(
                f"--methods {text} {' '.join(stray_methods)}: a list has no spaces; write --methods {corrected}"
            )


def _is_method(name: str) -> bool:
    try:
        return bool(name) and (is_baseline(name) or name == BLEND or bool(method_id(name)))
    except PerfedError:
        return False


def extend_runs(
    path: Path, experiment: str | None, settings: list[str] | None, methods: str, seeds: str | None, how: Training
) -> Study:
    """Return the comparison in ``path`` with more methods or seeds."""
    check_one_word(methods, [experiment, *(settings or [])])
    if how.out is not None:
        raise PerfedError(f"--out {how.out}: a comparison is extended where it is, in {path}; leave --out out")
    if experiment is not None and "=" in experiment:  # no experiment was given
        settings, experiment = [experiment, *(settings or [])], None
    names = parse_names(methods, baselines=True) if methods else []
    numbers = [] if seeds is None else parse_seeds(seeds)
    table = None if experiment is None else find_experiment(experiment)
    modules = [module for name in names for module in list_modules(name)]
    with refuse_modules(path, how.trust, modules):
        return extend(path, names, numbers, table, shared_settings(how, settings), resources_of(how))


# Execution ------------------------------------------------------------------------------------------------


@contextmanager
def handle_interruption(directory: Path, how: Training, *, resumed: bool = False) -> Iterator[None]:
    """Use the requested workers, and name the command that resumes the work after Ctrl-C or SIGTERM.

    ``resumed``: the command was itself a resumption, whose device may differ from that of the start.
    """
    use_workers(how.workers or 0, how.ray_address or "")
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stop:
        code = CTRL_C if isinstance(stop, KeyboardInterrupt) else TERMINATED if is_sigterm_exit(stop) else stop.code
        if code not in (CTRL_C, TERMINATED):
            raise
        options: dict[str, object] = {"--data-dir": how.data_dir, "--device": how.device if resumed else None}
        options |= {"--workers": how.workers, "--ray-address": how.ray_address}
        words = [str(directory), *(word for name, value in options.items() if value for word in (name, str(value)))]
        words += ["--trust"] if IMPORTED else []
        raise Stopped(f"{INTERRUPTED[code]}; 'perfed resume {shlex.join(words)}' continues", code) from None


def _choose_executor(how: Training, work: Work) -> Execute:
    """Return the function that executes runs, one by one or in parallel, and records their progress."""
    return (
        partial(execute_in_turn, execute=work.execute)
        if how.jobs == 1
        else Jobs(how.jobs, how.ray_address, work.update)
    )


# Results --------------------------------------------------------------------------------------------------


def finish_run(make: Callable[[], Run], directory: Path, name: str, method: str, show: Shown) -> None:
    """Execute a run, write its report and print its results; ``name`` is that of the experiment or of the data."""
    with show_progress(Work(1)) as work:
        summary = work.execute(make, method)
    _report_run(directory, f"{name}: {display_name(method)}", summary, show)


def _report_run(directory: Path, title: str, summary: dict[str, Any], show: Shown) -> None:
    report = write_report(load_runs([directory]), directory / "report.html", title=title)
    print_run(directory, summary, report, show)


def resume_run(directory: Path, rounds: int | None, how: Training, show: Shown) -> None:
    """Resume a run unless it has finished, and print its results."""
    report = directory / "report.html"
    files = RunDirectory(directory)
    if files.finished:
        files.check_summary()
    if is_done(directory) and files.is_intact and rounds in (None, files.newest()[0]):
        say("this run has finished")
        summary = files.read_summary()
        if report.exists():
            return print_run(directory, summary, report, show)
        return _report_run(directory, directory.name, summary, show)
    run = resume(directory, data_dir=how.data_dir, device=device_of(how), rounds=rounds)
    finish_run(lambda: run, directory, run.federation.name, run.name, show)


def finish(study: Study, how: Training, show: Shown) -> dict[str, Conclusion]:
    """Execute the runs of a study that are not finished, and print its results.

    Returns:
        The conclusions of its comparisons, by name; none for a search or a leaderboard.

    Raises:
        PerfedError: runs failed; the message says how many, and why the first one did.
    """
    if study.spec.kind == "leaderboard":
        _finish_leaderboard(study, how, show)
        return {}

    def report_outcome(label: str, outcome: dict[str, Any] | PerfedError) -> None:
        if isinstance(outcome, PerfedError):
            say_whole(f"failed: {outcome}", style="red")
        else:
            say_outcome(label, outcome, show.verbose)

    number, resources = len(study.keys), resources_of(how)
    with show_progress(Work(number)) as work:
        work.set_finished(number - len(study.list_unfinished()))
        execute = _choose_executor(how, work)
        if study.spec.kind == "search":
            choices = study.choose(resources, execute)
        else:
            conclusions, failed = study.execute(resources, execute, report_outcome)
    if study.spec.kind == "search":
        print_choice(study, choices, show)
        return {}
    reasons = [str(error) for error in failed]
    if "" in study.comparisons:
        print_conclusion(conclusions[""], show, failed=reasons)
    else:
        print_parts(study, *study.conclude(conclusions), show, failed=reasons)
    if failed:
        raise PerfedError(f"{len(failed)} of {number} runs failed; {failed[0]}")
    return conclusions


def _finish_leaderboard(study: Study, how: Training, show: Shown) -> None:
    def make_execute(label: str, runs: int) -> Execute:
        def execute(factory: RunFactory, keys: Sequence[Key]) -> Outcomes:
            say(f"{label}: {len(keys)} runs", style="dim")
            with show_progress(Work(max(runs, len(keys)))) as work:
                work.set_finished(runs - len(keys))
                yield from _choose_executor(how, work)(factory, keys)

        return execute

    failed = run_leaderboard(study, make_execute, resources_of(how))
    print_board(study, *conclude_leaderboard(study), show)
    if failed:
        raise PerfedError(f"{len(failed)} runs failed; {failed[0]}")


def check_gate(study: Study) -> None:
    """Refuse ``--fail-if-worse-than-local`` if all compared methods need a federation."""
    if not any(needs_no_federation(method) for _, method, _ in study.keys):
        raise PerfedError("--fail-if-worse-than-local: needs a local method among --methods: local, sklearn:NAME")


def end_if_worse(conclusion: Conclusion) -> None:
    """Raise ``SystemExit`` with code :data:`WORSE` if a federated method is worse than the best non-federated one."""
    verdict = conclusion.verdict
    if verdict is not None and verdict.below_local:
        say_whole(
            f"behind {display_name(verdict.reference)}: {', '.join(map(display_name, verdict.below_local))}",
            style="red",
        )
        raise SystemExit(WORSE)


def begin(out: Path, spec: Planned, how: Training, show: Shown, key: str = "") -> None:
    """Create a study in ``out``, or open the campaign, sweep or leaderboard that it contains, and run it."""
    with reserve_stdout(show.as_json):
        if isinstance(spec, Mapping):
            say(f"checking {len(spec)} comparisons on their data")
        run_study(Study.create(out, spec, resources_of(how), key), how, show)


def run_study(study: Study, how: Training, show: Shown) -> dict[str, Conclusion]:
    """Print the directory of a study, execute its unfinished runs (:func:`finish`), and return its conclusions."""
    with handle_interruption(study.path, how), reserve_stdout(show.as_json):
        say_where("results", study.path)
        return finish(study, how, show)


def create_run(make: Callable[[], Run], out: Path) -> Run:
    """Create a run and print the directory of its results."""
    run = make()
    say_where("results", out)
    return run
