"""Properties that every method must have: each check tests one of them on very small runs.

A check takes a function that builds the method, with settings that replace its own, and raises
:class:`~perfed.errors.PerfedError` in one line if the method fails. The tests of perfed's methods are these checks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import isclose, isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from perfed.aggregation.settings import Aggregation
from perfed.data.federation import Federation
from perfed.engine.evaluate import Metrics
from perfed.engine.executor import LocalExecutor
from perfed.engine.server import Server
from perfed.errors import PerfedError
from perfed.method.aggregation import find_reason_for_mean
from perfed.method.disclosure import find_disclosure
from perfed.method.extension import Extension
from perfed.method.method import Method
from perfed.model.placement import PER_DOMAIN, SENT, Placement
from perfed.participation.clock import Clock
from perfed.participation.settings import Participation
from perfed.run.directory import RunDirectory
from perfed.run.run import Run
from perfed.testing.federations import make_awkward_domains, make_blobs, make_named_columns, make_survival_data
from perfed.testing.runs import (
    ENGINES,
    CodecEngine,
    ForgetfulEngine,
    RecordingEngine,
    build_network_for,
    build_server,
    collect_tensors,
    measure_difference,
    run_rounds,
)
from perfed.training import plan as plans
from perfed.training.plan import Plan, PlanSettings
from perfed.tree import iterate_leaves

Make = Callable[..., Method]

SRPFL = Participation(policy="srpfl", srpfl={"first": 1, "rule": "fixed", "stage_rounds": 1})
# federation, rate of participation or policy
FEDERATIONS: dict[str, tuple[Callable[[], Federation], float | Participation]] = {
    "one client": (lambda: make_blobs((7,)), 1.0),
    "a client with one sample": (lambda: make_blobs((6, 1)), 1.0),
    "only one sample everywhere": (lambda: make_blobs((1, 1, 1), test=1), 1.0),
    "one class only": (lambda: make_blobs((6, 4), labels=[[0]], num_classes=1), 1.0),
    "one class per client": (lambda: make_blobs((6, 4, 5), labels=[[0], [2], [1]]), 1.0),
    "absent classes": (lambda: make_blobs((6, 4), labels=[[0, 1], [1]], num_classes=5), 1.0),
    "very unequal sizes": (lambda: make_blobs((60, 2, 1)), 1.0),
    "partial participation": (lambda: make_blobs((5, 4, 3, 3)), 0.3),
    "awkward domains": (make_awkward_domains, 1.0),
    "SRPFL": (lambda: make_blobs((5, 4, 3, 3)), SRPFL),
    "a client without test data": (lambda: make_blobs((5, 4, 3), test=(3, 0, 2)), 1.0),
    "no test data at all": (lambda: make_blobs((5, 4), test=0), 1.0),
    "columns that some share by name": (make_named_columns, 1.0),
    "input dimensions differ": (lambda: make_blobs((6, 5, 4), dims=(3, 8, 1)), 1.0),
}
# Each client separately, and chunks through bytes; the size of a cohort does not depend on the method.
TWO_ENGINES = {name: ENGINES[name] for name in ("sequential", "codec")}
SIZES, DIMS = (13, 9, 9, 6, 4, 3, 2, 1, 1), (4, 3, 6)
DIVISIONS: dict[str, dict[str, Any]] = {
    "all clients at once": {"engine": "stacked"},
    "chunks of 1": {"engine": "stacked", "chunk": 1},
    "chunks of 7": {"engine": "stacked", "chunk": 7},
    "chunks of 4 as bytes": {"engine": "stacked", "chunk": 4, "runner": CodecEngine},
    "one at a time as bytes": {"engine": "sequential", "runner": CodecEngine},
}


def require(holds: bool, message: str) -> None:
    """Raise :class:`~perfed.errors.PerfedError` with ``message`` unless ``holds``."""
    if not holds:
        raise PerfedError(message)


def require_finite(metrics: Metrics, where: str) -> None:
    """Raise an error if a metric is not finite."""
    for client, values in metrics.items():
        for name, value in values.items():
            require(isfinite(value), f"{where}: {name} of client '{client}' is {value}")


def require_finite_state(server: Server, where: str) -> None:
    """Raise an error if a tensor of the run's state is not finite."""
    for path, tensor in collect_tensors(server).items():
        require(bool(torch.isfinite(tensor.double()).all()), f"{where}: {'/'.join(path)} is not finite")


def require_close(metrics: Metrics, expected: Metrics, where: str) -> None:
    """Raise an error if metrics differ by more than the rounding of float64."""
    require(metrics.keys() == expected.keys(), f"{where}: other clients are measured")
    for client, values in metrics.items():
        same = values.keys() == expected[client].keys()
        same = same and all(isclose(v, expected[client][n], rel_tol=1e-8, abs_tol=1e-12) for n, v in values.items())
        require(same, f"{where}: client '{client}' is measured as {values}, expected {expected[client]}")


def requires_equal_shapes(method: Method) -> bool:
    """Return whether all clients must have inputs of one shape."""
    return not method.changes_data and has_first_stage_in(
        method, *SENT
    )  # otherwise every client maps inputs to a common dimension


def has_first_stage_in(method: Method, *placements: Placement) -> bool:
    """Return whether a parameter of the first stage has one of the placements."""
    chain = method.adapt(build_network_for(method)).build((3,))
    return any(n.startswith(chain.stages[0]) and p in placements for n, p in method.places(chain).items())


def make_unequal_clients(method: Method) -> Federation:
    """Return nine clients of different sizes, whose inputs differ in length if the method supports it."""
    return make_blobs(SIZES, dims=(4,) if requires_equal_shapes(method) else DIMS)


# The checks --------------------------------------------------------------------------------------------------


def check_training(case: str, make: Make, engines: Mapping[str, Mapping[str, Any]] = TWO_ENGINES) -> None:
    """Check that two rounds leave finite states and metrics, or inputs of other shapes are refused in one line."""
    build, who = FEDERATIONS[case]
    policy = who if isinstance(who, Participation) else Participation(rate=who)
    for engine, options in engines.items():
        method, federation = make(), build()
        arguments = {"model": build_network_for(method, federation.num_classes or 1), "rounds": 9, **options}
        arguments |= {"participation": policy, "clock": Clock(speeds="fixed") if policy is SRPFL else None}
        if case == "input dimensions differ" and requires_equal_shapes(method):
            refused = catch_refusal(partial(build_server, method, federation, **arguments))
            require("shape differs between clients" in refused, f"{engine}: inputs of other shapes are not refused")
            continue
        if federation.named_inputs is not None and has_first_stage_in(method, PER_DOMAIN):
            refused = catch_refusal(partial(build_server, method, federation, **arguments))
            require(
                "'per-domain' is for whole stages" in refused, f"{engine}: named columns per domain are not refused"
            )
            continue
        server = build_server(method, federation, **arguments)
        server.prepare()
        never, tested = set(federation.ids), {client.id for client in federation if client.split("test") is not None}
        for number in (1, 2):
            record = server.round(number, measure="test")
            never -= set(record.participants)
            require(set(server.evaluate("test", never_used=never)) == tested, f"{engine}: not all clients are measured")
            expected = number if policy is SRPFL else max(1, int(policy.rate * len(federation)))
            require(len(record.participants) == expected, f"{engine}: {record.participants} took part, not {expected}")
            require(isfinite(record.train_loss), f"{engine}: the training loss of round {number} is not finite")
        server.settle(sorted(never), 2)  # only SRPFL settles clients
        require_finite_state(server, engine)
        metrics = server.evaluate("test")
        require(set(metrics) == tested, f"{engine}: not all clients are measured")
        require_finite(metrics, engine)


def catch_refusal(attempt: Callable[[], object]) -> str:
    """Return the message with which ``attempt`` is refused, or an empty text if it is not."""
    try:
        attempt()
    except PerfedError as error:
        require("\n" not in str(error), f"a refusal has more than one line: {error!r}")
        return str(error)
    return ""


def check_engines(make: Make) -> None:
    """Check that results do not depend on the division of clients into chunks, or on sending them as bytes."""

    def run_division(options: Mapping[str, Any]) -> tuple[Server, Metrics, Metrics, float]:
        method = make()
        model = build_network_for(method, dropout=0.3)
        server = run_rounds(
            build_server(method, make_unequal_clients(method), model=model, rate=0.6, rounds=3, **options), 2
        )
        record = server.round(3, measure="test")
        require(
            set(record.after) == set(record.participants), "clients that did not take part are measured, or not all"
        )
        metrics = server.evaluate("test")
        require(metrics.keys() == set(server.engine.federation.ids), "not all clients are measured")
        return server, metrics, record.after, record.train_loss

    reference = run_division({"engine": "sequential"})
    for division, options in DIVISIONS.items():
        results = run_division(options)
        gap = measure_difference(results[0], reference[0])
        where = f"{division}, against one client at a time"
        require(gap <= 1e-8, f"{where}: states differ by {gap:.1e} of their size in float64")
        require(
            isclose(results[3], reference[3], rel_tol=1e-8),
            f"{where}: training losses are {results[3]} and {reference[3]}",
        )
        require_close(results[1], reference[1], where)
        require_close(results[2], reference[2], where)
    require(gap == 0, "bytes change the results of clients that work one at a time")  # the last of DIVISIONS


def check_engines_in_float32(make: Make) -> None:
    """Check that one round of SGD is the same up to the rounding of float32, for every division into chunks."""

    def run_round(options: Mapping[str, Any]) -> Server:
        method = make(optimizer="sgd", lr=1e-3)
        return run_rounds(
            build_server(method, make_unequal_clients(method), dtype=torch.float32, rounds=1, **options), 1
        )

    reference = run_round({"engine": "sequential"})
    for division, options in DIVISIONS.items():
        gap = measure_difference(run_round(options), reference)
        # A layer normalisation of few numbers amplifies rounding by some hundreds: 1.3e-4 was measured once.
        require(gap <= 3e-4, f"{division}, against one client at a time: states differ by {gap:.1e} of their size")


def run_with_plan(make: Make, plan: Plan, **options: Any) -> Server:
    """Return the server after two rounds and an evaluation with this plan."""
    method = make()
    model = build_network_for(method, dropout=0.3)
    server = run_rounds(build_server(method, make_unequal_clients(method), model=model, plan=plan, **options), 2)
    server.evaluate("test")
    return server


def check_recorded_plan(make: Make) -> None:
    """Check that a run with the plan that another has recorded makes no new choices, and ends with its bits."""
    plan = Plan("auto", threads=1, remember=False)
    first = run_with_plan(make, plan, rate=0.8)
    recorded = plan.to_dict()
    steps = make().epochs_in(1) > 0  # without steps, as with batch-norm, there are no choices
    require(not steps or bool(recorded["paths"] or plan.reasons), "no path was chosen")
    for _ in range(2):
        again = PlanSettings.model_validate(recorded).build()
        gap = measure_difference(run_with_plan(make, again, rate=0.8), first)
        require(again.to_dict() == recorded, f"paths are chosen again: {again.to_dict()}, recorded {recorded}")
        require(gap == 0, f"with the recorded plan states differ by {gap:.1e} of their size")


def check_parallel_chunks(make: Make) -> None:
    """Check that chunks that run at the same time give the same bits as chunks that run one after the other."""
    plan = Plan("auto", threads=1, remember=False)
    run_with_plan(make, plan)
    if plan.reasons:
        return  # a method with batch-norm has no chunks
    pairs = [Plan("auto", threads=n, paths={kind: plans.Path(2, 1) for kind in plan.paths}) for n in (1, 3)]
    gap = measure_difference(*(run_with_plan(make, pair) for pair in pairs))
    require(all(set(pair.paths) == set(plan.paths) for pair in pairs), "there is other work than before")
    require(gap == 0, f"chunks on three threads differ by {gap:.1e} from chunks on one")


def check_clients_are_separate(make: Make) -> None:
    """Check that what one client sends and keeps does not depend on another's data, in any exchange."""
    method, federation = make(), make_blobs((8, 7, 6))
    server = run_rounds(build_server(method, federation, runner=RecordingEngine, rounds=2), 2)
    server.evaluate("test")
    last = federation.clients[-1]
    changed_client = replace(last, train=replace(last.train, x=1.5 * last.train.x + 1))
    changed = build_server(
        make(), replace(federation, clients=(*federation.clients[:-1], changed_client)), rounds=2
    ).engine
    host = LocalExecutor(changed.federation, changed.background, changed.initialiser, changed.plan)
    assert isinstance(server.engine, RecordingEngine)
    for work, result in server.engine.record:
        again = host.attempt(work)
        for row, client in enumerate(work.ids):
            if client != last.id:
                where = f"round {work.exchange.round}, program '{work.exchange.program}'"
                states = result.states.get(client, {}), again.states.get(client, {})
                for part_name, (mine, theirs) in {
                    "reply": (result.reply(row), again.reply(row)),
                    "state": states,
                }.items():
                    same = all(
                        torch.equal(a[1], b[1])
                        for a, b in zip(iterate_leaves(mine), iterate_leaves(theirs), strict=True)
                    )
                    require(same, f"{where}: the {part_name} of client '{client}' changes with the data of '{last.id}'")


def check_state_is_declared(make: Make) -> None:
    """Check that client programs only depend on the payload and the client's declared sets."""
    runs = []
    for runner in (RecordingEngine, ForgetfulEngine):
        method = make()
        runs.append(run_rounds(build_server(method, make_blobs((8, 7, 6)), runner=runner, rounds=3), 3))
    gap = measure_difference(*runs)
    require(
        gap == 0, f"created again for every exchange, the method ends elsewhere ({gap:.1e}); declare state in sets()"
    )


def check_seed(make: Make) -> None:
    """Check that runs with one seed give the same bits, whatever the global generators of random numbers hold."""
    runs = []
    before = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        for seed in (1, 2):
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            runs.append(run_rounds(build_server(make(), make_blobs((8, 7, 6)), rate=0.7, rounds=3), 3))
    finally:
        torch.random.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
    gap = measure_difference(*runs)
    require(gap == 0, f"two runs of one seed differ by {gap:.1e}; random numbers come from keys, state from sets()")


def check_sent_entries(make: Make) -> None:
    """Check that a method and its extensions that declare what they send (``disclosure``) send just these entries."""
    method = make()
    server = run_rounds(
        build_server(method, make_blobs((8, 7, 6)), model=build_network_for(method), runner=RecordingEngine, rounds=2),
        2,
    )
    server.evaluate("test")
    assert isinstance(server.engine, RecordingEngine)
    replies = [result.content for _, result in server.engine.record]
    parts: list[tuple[str, Method | Extension, list[Mapping[str, Any]]]] = [("the method", method, replies)]
    for extension in method.extensions:
        carried = [reply.get("extensions", {}).get(extension.name, {}) for reply in replies]
        parts.append((f"extension '{extension.name}'", extension, carried))
    for name, part, contents in parts:
        disclosure = find_disclosure(type(part))
        if disclosure is not None:
            sent = {entry for content in contents for entry in content} - {"extensions"}
            declared = set(disclosure.sent_entries(part))
            require(sent == declared, f"{name} sends {sorted(sent)}, and its disclosure declares {sorted(declared)}")


ROBUST = (
    Aggregation(kind="median"),
    Aggregation(kind="trimmed-mean", trim=0.2),
    Aggregation(kind="norm-bound", bound=1e-3),
)
"""Kinds of aggregation whose results differ from the mean in almost every round."""


def check_aggregation_kinds(make: Make) -> None:
    """Check that each kind of aggregation replaces the mean, or is refused in one line with the declared reason."""
    reason = find_reason_for_mean(make())

    def serve_with(aggregation: Aggregation, options: Mapping[str, Any]) -> Server:
        method = make()
        return build_server(
            method, make_blobs((8, 7, 6)), model=build_network_for(method), aggregation=aggregation, **options
        )

    for engine, options in TWO_ENGINES.items():
        mean = serve_with(Aggregation(), options)
        before = dict(iterate_leaves(mean.sets))
        after = dict(iterate_leaves(run_rounds(mean, 2).sets))
        averages = any(not torch.equal(tensor, after[path]) for path, tensor in before.items())
        for aggregation in ROBUST:
            where = f"{engine}, aggregation.kind = '{aggregation.kind}'"
            if reason:
                message = catch_refusal(partial(serve_with, aggregation, options))
                require(reason in message, f"{where}: it is not refused with the declared reason (needs_mean)")
                continue
            server = run_rounds(serve_with(aggregation, options), 2)
            require_finite_state(server, where)
            require_finite(server.evaluate("test"), where)
            same = all(torch.equal(tensor, after[path]) for path, tensor in iterate_leaves(server.sets))
            require(not (averages and same), f"{where}: the result is that of the mean; use clients.mean")


class _Stop(Exception):
    """An exception that ends a run in the middle."""


def check_resumed_run(make: Make) -> None:
    """Check that a run that is stopped after two of four rounds and resumed with a new method object gives the same
    bits.
    """

    def run(directory: RunDirectory | None = None) -> Run:
        method = make()
        options: dict[str, Any] = {"dtype": torch.float64, "plan": Plan("stacked", threads=1), "directory": directory}
        who = Participation(rate=0.7)
        return Run(make_blobs((8, 7, 6)), method, build_network_for(method), rounds=4, participation=who, **options)

    def stop(number: int, *_: object) -> None:
        if number == 2:
            raise _Stop

    uninterrupted = run()
    uninterrupted.execute()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        with suppress(_Stop):
            run(RunDirectory.create(path)).execute(stop)
        resumed = run(RunDirectory(path))
        resumed.restore()
        require(resumed.resumed == 2, f"the run resumes behind round {resumed.resumed}, not 2")
        resumed.execute()
        gap = measure_difference(resumed.server, uninterrupted.server)
    require(gap == 0, f"the resumed run differs by {gap:.1e} from the whole one; what is kept outside sets()?")


def check_evaluation(make: Make) -> None:
    """Check that evaluation works on copies: states stay, and a second one measures the same."""
    server = run_rounds(build_server(make(), make_blobs(), rate=0.7), 1)
    before = {path: tensor.clone() for path, tensor in collect_tensors(server).items()}
    first = server.evaluate("test")
    require(server.evaluate("test") == first, "a second evaluation measures something else")
    for path, tensor in collect_tensors(server).items():
        require(path in before and torch.equal(before[path], tensor), f"evaluation changes {'/'.join(path)}")


REQUIRED_ACCURACY = 0.67
"""Mean accuracy that :func:`check_learning` requires; predicting one class for all samples yields 0.5."""
_ROUNDS, _PERIOD = 240, 12  # largest number of rounds of check_learning(), and rounds between its evaluations


def check_learning(make: Make) -> None:
    """Check that at most 240 rounds on two easy clients beat guessing on their training data.

    Most methods need 12; those with a small learning rate, large mini-batches or plain SGD need more.
    """
    method, accuracy = make(), 0.0
    server = build_server(method, make_blobs((30, 30), labels=[[0, 1], [1, 2]], test=20), seed=1)
    server.prepare()
    for number in range(1, _ROUNDS + 1):
        server.round(number)
        if number % _PERIOD == 0:
            values = server.evaluate("train").values()
            accuracy = sum(value["accuracy"] for value in values) / len(values)
            if accuracy > REQUIRED_ACCURACY:
                return
    raise PerfedError(
        f"the mean accuracy on training data is {accuracy:.2f} after {_ROUNDS} rounds; it must exceed "
        f"{REQUIRED_ACCURACY}"
    )


def check_task(task: str, make: Make) -> str:
    """Check that the method trains for values or survival times, or refuses them in one line, which is returned."""
    refusal = ""
    for engine, options in TWO_ENGINES.items():
        federation = make_blobs((9, 1, 4), regression=True) if task == "regression" else make_survival_data()
        served: list[Server] = []
        refusal = catch_refusal(lambda: served.append(run_rounds(build_server(make(), federation, **options), 2)))  # noqa: B023 - called here
        if refusal:
            continue
        require_finite_state(served[0], engine)
        metrics = served[0].evaluate("test")
        require(set(metrics) == set(federation.ids), f"{engine}: not all clients are measured")
        require_finite(metrics, engine)
        names = set[str]().union(*metrics.values())
        expected = {"mse"} if task == "regression" else {"c-index", "loss"}
        require(names == expected, f"{engine}: measured is {sorted(names)}, not {sorted(expected)}")
    return refusal


CHECKS: dict[str, Callable[[Make], object]] = {
    "learns": check_learning,
    **{f"trains on {case}": partial(check_training, case) for case in FEDERATIONS},
    "the seed decides": check_seed,
    "clients are not mixed": check_clients_are_separate,
    "state is declared": check_state_is_declared,
    "declared entries are sent": check_sent_entries,
    "aggregation is replaced or refused": check_aggregation_kinds,
    "a resumed run ends with the same bits": check_resumed_run,
    "evaluation changes nothing": check_evaluation,
    "engines agree": check_engines,
    "engines agree in float32": check_engines_in_float32,
    "a recorded plan gives the same bits": check_recorded_plan,
    "chunks side by side give the same bits": check_parallel_chunks,
    **{f"deals with {task}": partial(check_task, task) for task in ("regression", "survival")},
}
