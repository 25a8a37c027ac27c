"""Ray workers: whatever their number and their deaths, a run's bits are those of its plan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from engines import blobs, difference, make, network, quick, serve, train

from perfed.codec import decode, encode
from perfed.engine.ray.engine import CHUNK, RayEngine
from perfed.engine.ray.keeping import keep_workers
from perfed.engine.ray.where import use_workers
from perfed.errors import PerfedError
from perfed.experiment.config import validate
from perfed.experiment.start import resume, start
from perfed.methods.ditto import Ditto
from perfed.participation.settings import Participation
from perfed.training.plan import Path as Way
from perfed.training.plan import Plan, PlanSettings
from perfed.tree import count_bytes

SIZES, DIMS = (13, 9, 9, 6, 4, 3, 2, 1, 1), (4, 3, 6)
pytestmark = [pytest.mark.network, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def ray():
    """One Ray for all tests, as a user's Python may have; its five cores are only counted."""
    found = pytest.importorskip("ray", reason="needs perfed[ray]")
    found.init(address="local", num_cpus=5, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield found
    found.shutdown()


@pytest.fixture(autouse=True)
def default_workers():
    yield
    use_workers()


def on_ray(method, federation, workers: int, **options):
    """A server whose engine has so many Ray workers."""
    use_workers(workers)
    plan = options.pop("plan", None) or Plan("ray", chunk=1)
    return serve(method, federation, plan=plan, runner=RayEngine, **options)


def with_initial(server):
    """The server, where clients that have done nothing have the state that they begin with."""
    for client in server.federation:
        server.engine.states.setdefault(client.id, server.initialiser.client_state(client, server.engine.info))
    return server


METHODS = {
    "flic-hl": ("flic-hl", 1, {}),
    "fedpac": ("fedpac", 2, {}),
    "feddar-sa": ("feddar-sa", 2, {}),  # folds the clients' Hessians
    "fedrep under srpfl": ("fedrep", 2, {"participation": Participation(policy="srpfl")}),
    "ditto with some of the clients": ("ditto", 3, {"rate": 0.5}),
    "knn-per": ("knnper", 1, {}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_one_client_per_chunk_gives_the_bits_of_one_process(ray, name):
    method, workers, options = METHODS[name]
    federation = blobs(SIZES, dims=DIMS if method == "flic-hl" else (4,))
    alone = serve(make(method), federation, engine="sequential", rounds=3, **options)
    many = on_ray(make(method), federation, workers, rounds=3, **options)
    with many.engine.working():
        records = [
            [server.prepare(), *(server.round(n, measure="test") for n in (1, 2, 3))] for server in (alone, many)
        ]
        assert many.evaluate("test") == alone.evaluate("test")
        assert ray.available_resources().get("CPU", 0) == 5 - workers
    assert [(r.bytes_up, r.train_loss, r.after) for r in records[0][1:]] == [
        (r.bytes_up, r.train_loss, r.after) for r in records[1][1:]
    ]
    assert difference(with_initial(many), with_initial(alone)) == 0
    assert many.drain_notes() == [f"Ray: {workers} worker{'s of 1 thread each' if workers > 1 else ' of 1 thread'}"]


@pytest.mark.long
def test_chunks_and_choices_come_from_the_plan_and_not_from_the_workers(ray):
    said, tried = [], []

    class Trying:
        def __enter__(self):
            tried.append("begun")

        def __exit__(self, *_):
            tried.append("ended")

    plan = Plan("ray", on_choice=lambda: said.append(dict(plan.paths)), trying=Trying)
    federation, model, runs = blobs(SIZES * 4), network(dropout=0.3), []
    for workers in (2, 1, 5):
        server = on_ray(make("fedrep"), federation, workers, plan=plan, model=model, rate=0.8)
        with server.engine.working():
            train(server, 2).evaluate("test")
        runs.append(with_initial(server))
        assert plan.to_dict() == runs[0].plan.to_dict()  # nothing is decided anew
        plan = PlanSettings.model_validate(plan.to_dict()).build()
    assert plan.paths[CHUNK] == Way(2, 1)  # a sixteenth of 29 clients
    assert {"fit head", "fit body", "forward embedding+body+head"} <= plan.paths.keys() | {"fit body"}
    assert said and tried[:2] == ["begun", "ended"] and list(said[0]) == [CHUNK]
    assert difference(runs[1], runs[0]) == 0 and difference(runs[2], runs[0]) == 0
    alone = train(serve(make("fedrep"), federation, engine="sequential", model=model, rate=0.8), 2)
    assert difference(runs[0], with_initial(alone)) <= 1e-8


@pytest.mark.long
def test_a_run_resumes_with_another_number_of_workers(ray, tmp_path):
    table = {
        "method": "ditto",
        "rounds": 4,
        "data": {"name": "digits", "clients": 6, "samples": 120, "partition": "iid"},
        "model": {"body": "hidden-layer", "head": "linear"},
        "participation": {"rate": 0.5},
        "checkpoint_seconds": 0,
        "plan": {"engine": "ray", "chunk": 1},
    }
    alone = start(validate({**table, "plan": {"engine": "sequential", "threads": 1}}))
    use_workers(2)
    cut = start(validate(table), out=tmp_path / "run")

    def stop(number, rounds, accuracy):
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut.execute(stop)
    use_workers(1)
    resumed = resume(tmp_path / "run")
    summary = resumed.execute()
    assert summary["metrics"] == alone.execute()["metrics"]
    assert {"Ray: 2 workers of 1 thread each", "Ray: 1 worker of 1 thread"} <= set(summary["notes"])
    assert difference(with_initial(resumed.server), with_initial(alone.server)) == 0


# Deaths and errors ------------------------------------------------------------------------------------------


class Dying(Ditto):
    """Ditto whose client c2 kills its worker ``deaths`` times in round 2; every worker writes down its number."""

    folder: str = ""
    deaths: int = 0

    def train(self, cohort, *args, **payload):
        if self.folder:
            (Path(self.folder) / f"pid-{os.getpid()}").touch()
        if cohort.where.round == 2 and "c2" in cohort.ids:
            for death in range(self.deaths):
                try:
                    (Path(self.folder) / f"death-{death}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
        return super().train(cohort, *args, **payload)


@pytest.mark.long
def test_the_bits_survive_workers_that_die_in_a_round_and_between_rounds(ray, tmp_path):
    federation = blobs(SIZES[:5])
    alone = train(serve(quick(Ditto), federation, engine="sequential"), 3)
    server = on_ray(quick(Dying, folder=str(tmp_path), deaths=1), federation, 2)
    with server.engine.working():
        train(server, 2)
        for file in tmp_path.glob("pid-*"):
            try:
                os.kill(int(file.name.removeprefix("pid-")), signal.SIGKILL)
            except ProcessLookupError:  # it was the one that died in round 2
                continue
        server.round(3)
    assert difference(with_initial(server), with_initial(alone)) == 0
    said = server.drain_notes()
    assert said[:2] == ["Ray: 2 workers of 1 thread each", "a worker died in round 2 and was replaced"]
    assert set(said[2:]) == {"a worker died in round 3 and was replaced"}


@pytest.mark.long
def test_a_work_that_kills_every_worker_ends_the_round_as_if_it_had_not_begun(ray, tmp_path):
    server = on_ray(quick(Dying, folder=str(tmp_path), deaths=9), blobs(SIZES[:3]), 1)
    with server.engine.working():
        train(server, 1)
        before = {client: encode(state) for client, state in server.engine.states.items()}
        with pytest.raises(
            PerfedError,
            match=r"^3 Ray workers died one after the other in round 2 during the work on client c2 .*chunk",
        ):
            server.round(2)
    assert {client: encode(state) for client, state in server.engine.states.items()} == before


class Mistaken(Ditto):
    """Ditto with a mistake at client c1."""

    def train(self, cohort, *args, **payload):
        if "c1" in cohort.ids:
            raise KeyError("weights")
        return super().train(cohort, *args, **payload)


@pytest.mark.long
def test_errors_of_client_programs_arrive_as_in_one_process(ray):
    bad = {"lr": 1e300, "optimizer": "sgd"}
    with pytest.raises(PerfedError) as expected:
        train(serve(make("ditto", **bad), blobs(), engine="sequential"), 3)
    server = on_ray(make("ditto", **bad), blobs(), 1)
    with server.engine.working(), pytest.raises(PerfedError) as found:
        train(server, 3)
    assert str(found.value) == str(expected.value) and "the training loss of client" in str(found.value)
    server = on_ray(quick(Mistaken), blobs(), 1)
    with server.engine.working(), pytest.raises(PerfedError, match=r"test_ray_engine.py, line \d+, in train: KeyError"):
        train(server, 1)


@pytest.mark.long
def test_data_and_states_are_sent_once(ray, monkeypatch):
    from perfed.data.client import Client
    from perfed.engine.ray import pool

    clients, states, pack = [], [], pool.pack

    def watched(content):
        if isinstance(content, Client):
            clients.append(content.id)
        if isinstance(content, pool.Task):
            states.extend(i for i, (_, state) in content.states.items() if state is not None)
        return pack(content)

    monkeypatch.setattr(pool, "pack", watched)
    server = on_ray(quick(Ditto), blobs((20, 19, 18), dims=(1000,)), 1)
    with server.engine.working():
        train(server, 3).evaluate("test")
        assert sorted(clients) == ["c0", "c1", "c2"] and not states
        server.restore(server.snapshot())
        server.engine.states["c1"] = decode(encode(server.engine.states["c1"]))  # as from a checkpoint
        server.round(4)
    assert sorted(clients) == ["c0", "c1", "c2"] and states == ["c1"]


@pytest.mark.long
def test_states_on_disk_go_with_the_work(ray, monkeypatch, tmp_path):
    from perfed.engine.ray import pool

    sent, pack = [], pool.pack

    def watched(content):
        if isinstance(content, pool.Task):
            sent.extend(state is not None for _, state in content.states.values())
        return pack(content)

    monkeypatch.setattr(pool, "pack", watched)
    federation = blobs(SIZES)
    alone = train(serve(make("ditto"), federation, engine="sequential", rate=0.5), 3)
    one = max(count_bytes(state) for state in alone.engine.states.values())
    many = on_ray(make("ditto"), federation, 2, rate=0.5, plan=Plan("ray", chunk=1, hold=3 * one))
    many.put_states_in(tmp_path)
    with many.engine.working():
        train(many, 3)
        assert many.evaluate("test") == alone.evaluate("test")
    assert many.engine.holder.bytes == 3 * one
    assert len(list(tmp_path.rglob("*.safetensors"))) == len(many.engine.states) - 3 > 0
    assert sent.count(False) <= 2 < sent.count(True)  # each worker is told so with the work after: it keeps none
    assert difference(with_initial(many), with_initial(alone)) == 0


@pytest.mark.long
def test_workers_go_on_from_run_to_run_with_nothing_left_of_the_run_before(ray, tmp_path):
    """Each run has the bits that it has alone, also after an error, and after a worker died between two runs."""

    def processes(name, sizes):
        folder = tmp_path / name
        folder.mkdir()
        server = on_ray(quick(Dying, folder=str(folder), deaths=0), blobs(sizes), 2)
        with server.engine.working():
            train(server, 3)
        alone = train(serve(quick(Ditto), blobs(sizes), engine="sequential"), 3)
        assert difference(with_initial(server), with_initial(alone)) == 0
        return {int(file.name.removeprefix("pid-")) for file in folder.glob("pid-*")}

    with keep_workers():
        first, second = processes("first", SIZES[:5]), processes("second", SIZES[:4])
        assert first == second and len(first) == 2
        server = on_ray(quick(Mistaken), blobs(), 2)
        with server.engine.working(), pytest.raises(PerfedError, match="KeyError"):
            train(server, 1)
        third = processes("third", SIZES[:5])
        os.kill(min(third), signal.SIGKILL)
        fourth = processes("fourth", SIZES[:5])
        assert min(third) not in fourth and len(fourth) == 2
    assert not processes("alone", SIZES[:3]) & fourth


# Clusters ---------------------------------------------------------------------------------------------------

CLUSTER = """
import sys, torch
torch.set_num_threads(1)
from ray.cluster_utils import Cluster
from engines import blobs, difference, make
from perfed import Model, Run, hidden_layer, linear, use_workers
from perfed.training.plan import Plan

def run(plan):
    model = Model(body=hidden_layer(5), head=linear(3))
    return Run(blobs((13, 9, 7, 5)), make("ditto"), model, rounds=3, plan=plan)

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
use_workers(address=cluster.address)
many = run(Plan("ray", chunk=1))
many.execute(lambda number, rounds, accuracy: cluster.remove_node(second) if number == 1 else None)
alone = run(Plan("sequential", threads=1))
alone.execute()
print(difference(many.server, alone.server), many.notes)
cluster.shutdown()
"""


@pytest.mark.long
def test_a_cluster_of_two_nodes_one_of_which_goes_away():
    pytest.importorskip("ray", reason="needs perfed[ray]")
    tests = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", CLUSTER], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(0.0) + " " + str(
        ["Ray: 2 workers of 1 thread each", "a worker died in round 2; the others do its work, for lack of free cores"]
    )


@pytest.mark.long
def test_more_workers_than_there_is_room_for_and_another_address(ray):
    server = on_ray(make("fedavg"), blobs(), 6)
    with pytest.raises(PerfedError, match=r"6 Ray workers with plan.threads = 1 need 6 free cores; there are 5"):
        train(server, 1)
    server = on_ray(make("fedavg"), blobs(), 1)
    use_workers(1, "10.0.0.1:6379")
    with pytest.raises(
        PerfedError, match=r"Ray address 10\.0\.0\.1:6379: this Python is connected with the Ray at .* already"
    ):
        train(server, 1)


@pytest.mark.long
def test_an_address_where_nothing_answers():
    pytest.importorskip("ray", reason="needs perfed[ray]")
    from perfed.engine.ray.cluster import check_answers

    with pytest.raises(PerfedError, match=r"no Ray cluster answers at 127.0.0.1:1: "):
        check_answers("127.0.0.1:1")


@pytest.mark.long
def test_addresses_and_numbers_that_cannot_be():
    with pytest.raises(PerfedError, match="Ray address 'north': must be HOST:PORT"):
        use_workers(address="north")
    with pytest.raises(PerfedError, match="workers = -1"):
        use_workers(-1)
