"""A run on clients whose samples are read when they are used is the run on the same clients in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engines import blobs

from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.model.chain import Model
from perfed.model.presets import hidden_layer, linear, mlp
from perfed.participation.settings import Participation
from perfed.run.directory import RunDirectory
from perfed.run.run import Run
from perfed.run.settings import Evaluation
from perfed.training.plan import Plan
from perfed.tree import map_leaves

SIZES = (12, 7, 5, 9, 6)


def read_from(federation: Federation):
    clients = {client.id: client for client in federation}

    def read(client: str) -> dict[str, torch.Tensor]:
        found = {}
        for name in ("train", "validation", "test"):
            if (split := clients[client].split(name)) is not None:
                found |= {f"x_{name}": split.x, f"y_{name}": split.y, f"domain_{name}": split.domain}
        return found

    return read


def executed(federation: Federation, method: str, model: Model, folder, **options) -> Run:
    directory = RunDirectory.create(folder)
    run = Run(federation, method, model, rounds=3, dtype=torch.float64, directory=directory, **options)
    run.execute()
    return run


def leaves(value: object) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_leaves(value, lambda _, tensor: found.append(tensor) or tensor)
    return found


SAME = ("wall_seconds", "training_seconds", "peak_memory_mb")


def without_times(record: dict) -> dict:
    return {key: value for key, value in record.items() if key not in SAME}


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "dims", "hold"),
    [
        ("fedavg", (4,), 1 << 20),
        ("fedrep", (4,), 0),
        ("flic-class", (4, 3), 700),
        ("feddar-sa", (4,), 700),
        ("ditto", (4,), 0),
    ],
)
def test_it_is_the_same_run(tmp_path, method, dims, hold):
    eager = blobs(SIZES, dims=dims, validation=3)
    deferred = Federation.from_source(read_from(eager), eager.ids, hold=hold)
    embedding = mlp((6,), 5) if method.startswith("flic") else None
    model = Model(embedding=embedding, body=hidden_layer(6), head=linear(3))
    options = {
        "participation": Participation(rate=0.6),
        "plan": Plan("stacked", chunk=2),
        "evaluation": Evaluation(metrics=["auc"], classes="held"),
    }
    one, other = (
        executed(federation, method, model, tmp_path / name, **options)
        for name, federation in (("eager", eager), ("deferred", deferred))
    )
    assert list(map(without_times, one.history)) == list(map(without_times, other.history))
    assert without_times(one.summary) == without_times(other.summary)
    assert (tmp_path / "eager/clients.csv").read_bytes() == (tmp_path / "deferred/clients.csv").read_bytes()
    mine, its = (leaves({"server": run.server.sets, "clients": run.server.snapshot().clients}) for run in (one, other))
    assert len(mine) == len(its) > 0
    assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))


def test_a_server_without_the_data_starts_as_the_simulation_does():
    eager = blobs(SIZES, validation=3)
    facts = [client.facts() for client in eager]
    server = Federation.from_source(None, facts, num_classes=eager.num_classes, name=eager.name)
    runs = [
        Run(f, "fedrep", Model(body=hidden_layer(6), head=linear(3)), rounds=2, plan=Plan("stacked"))
        for f in (server, eager)
    ]
    states = [leaves(run.server.sets) for run in runs]
    assert len(states[0]) == len(states[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    assert runs[0].notes == runs[1].notes
    with pytest.raises(PerfedError, match="client 'c0': its data stay at the site"):
        runs[0].execute()


def test_only_the_clients_of_a_round_are_read():
    eager = blobs(SIZES, validation=3)
    read = set()

    def noting(client):
        read.add(client)
        return read_from(eager)(client)

    federation = Federation.from_source(noting, [client.facts() for client in eager], num_classes=3)
    run = Run(
        federation,
        "fedavg",
        Model(head=linear(3)),
        rounds=1,
        participation=Participation(rate=0.4, last_round="sampled"),
        evaluation=Evaluation(who="participants"),
        plan=Plan("stacked", chunk=2),
    )
    assert not read
    run.execute()
    assert read == set(run.history[-1]["participants"]) and len(read) == 2


def test_a_resumed_run_is_refused_where_the_facts_are_others(tmp_path):
    eager = blobs(SIZES)
    facts = [client.facts() for client in eager]
    federation = Federation.from_source(read_from(eager), facts, num_classes=3)
    executed(federation, "fedavg", Model(head=linear(3)), tmp_path / "run")
    changed = Federation.from_source(read_from(eager), [replace(f, mark=1) for f in facts], num_classes=3)
    again = Run(
        changed,
        "fedavg",
        Model(head=linear(3)),
        rounds=3,
        dtype=torch.float64,
        directory=RunDirectory(tmp_path / "run"),
    )
    with pytest.raises(PerfedError, match="this run was on other clients, samples or targets"):
        again.restore()
