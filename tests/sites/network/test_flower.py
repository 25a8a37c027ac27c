"""Three sites on loopback, over TLS with keys: methods, what goes wrong and is named, what comes back and goes on.

The tests share one server and one run, in the order in which they are written: what a later one needs, an earlier one
has left going. Expected outcomes are written beside each fault.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("flwr", reason="needs the extra flower")

from command_line import perfed
from loopback import RECORDER, SERVER, Authority, Loopback, free_port, same_bits, site_key, until, write_app

from perfed.client_model.card import card
from perfed.errors import PerfedError
from perfed.experiment.config import validate
from perfed.report import load_runs, verdict
from perfed.sites.deploy import server_app
from perfed.sites.deploy.own_model import load_site_model
from perfed.sites.deploy.policy import Policy
from perfed.sites.deploy.site_agent import SiteAgent
from perfed.sites.deploy.spending import compute_ledger_epsilon, read_ledger
from perfed.sites.deploy.study import make_deployed_study
from perfed.sites.flower.adapter import hash_bundle
from perfed.sites.flower.node import MessageHandler, serve_messages
from perfed.sites.flower.probe import ServerAddress, Unreachable, probe_server
from perfed.sites.flower.refusal import RefusalReason
from perfed.sites.flower.submission import Submitter
from perfed.sites.flower.transport import Answer

pytestmark = [pytest.mark.network, pytest.mark.long, pytest.mark.xdist_group("network")]
NAMES = ["north", "south", "west"]
HEARD = {"north": "n", "south": "s", "west": "w"}
PATIENT = 60.0
"""Seconds for an exchange that must succeed, on a busy machine."""


def handle(request: bytes) -> bytes:
    """What a site's worker does: sleep, fail, or the text in capitals."""
    word, _, rest = request.decode().partition(" ")
    if word == "sleep":
        time.sleep(float(rest))
    if word == "fail":
        raise PerfedError("north.csv: no column 'age'")
    return request.upper()


class Sites:
    """In the place of :func:`handle` while a method is run: one at a time, for they share this process."""

    def __init__(self) -> None:
        self.at: dict[str, SiteAgent] = {}
        self.turn = threading.Lock()

    def answer(self, site: str, request: bytes) -> bytes:
        if not self.at:
            return handle(request)
        with self.turn:
            return self.at[site].answer(request)


@pytest.fixture(scope="module")
def sites():
    return Sites()


@pytest.fixture(scope="module")
def folder():
    with TemporaryDirectory(prefix="fl") as name:  # pytest's are too long for a socket
        yield Path(name)


@pytest.fixture(scope="module")
def connections(folder):
    """This process, where the sites are, and every one that is started from here on write down whom they connect to."""
    file, watching, own = folder / "connections", [True], {}
    (folder / "record").mkdir()
    (folder / "record" / "sitecustomize.py").write_text(RECORDER.format(file=str(file)) + "sys.addaudithook(note)\n")
    exec(RECORDER.format(file=str(file)), own)
    sys.addaudithook(lambda *of: watching and own["note"](*of))  # for good: nobody can take it away
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ":".join([str(folder / "record"), str(Path(__file__).parents[3])]))
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            patch.delenv(name, raising=False)
        yield file
    watching.clear()


@pytest.fixture(scope="module")
def authority(folder):
    return Authority(folder / "ours")


@pytest.fixture(scope="module")
def federation(folder, connections, authority, sites):
    """A server over TLS, three sites with registered keys, a run that takes orders."""
    with Loopback(folder / "server", authority.server("server")) as loopback:
        for name in NAMES:
            private, public = site_key(folder, name)
            loopback.register(public, name)
            loopback.add(name, partial(sites.answer, name), private)
        loopback.start(write_app(folder / "app"))
        assert loopback.missing(NAMES, PATIENT) == []
        yield loopback


def test_an_exchange_over_tls_with_names_from_keys(federation):
    found = federation.exchange(HEARD, PATIENT)
    assert {site: text for site, (text, _, _) in found.items()} == {"north": "N", "south": "S", "west": "W"}


def test_an_error_of_a_site_is_one_line_and_the_others_count(federation):
    found = federation.exchange(HEARD | {"north": "fail"}, PATIENT)
    assert found["north"][:2] == ["", f"site 'north': {RefusalReason.FAILED}"]  # what failed, its own terminal says
    assert [found["south"][0], found["west"][0]] == ["S", "W"]


METHODS = {
    "fedpac": {},
    "feddar-sa": {"data": {"domain": "sex"}},  # two exchanges a round
    "fedrep-srpfl": {"participation": {"srpfl": {"first": 3}}},  # a policy that does not wait for all
    "ditto": {},
    "fedavg-ft": {"data": {"columns": "named"}},  # one site lacks a column that the others share
    "mixed": {"data": {"columns": "named"}},
    "fedavg": {"secure_aggregation": {}},  # replies under masks, of which the server gets the sum
}
"""FLIC is in docs/tutorials/deploy.md; over bytes alone every method does so: tests/sites/flower/test_parity.py."""


class Remote:
    """The sites as a server's program sees them, which is in this process: its messages go the whole way."""

    def __init__(self, federation: Loopback) -> None:
        self.note, self.wait_for, self._federation = print, federation.missing, federation

    def list_sites(self) -> list[str]:
        return NAMES

    def exchange(self, messages, deadline, least=0):
        found = self._federation.exchange({s: m.decode("latin-1") for s, m in messages.items()}, deadline)
        for site, (text, error, seconds) in found.items():
            yield Answer(site, None if error else text.encode("latin-1"), error, seconds)


@pytest.fixture
def stations(folder, federation, sites):
    """The sites with tables of their own, one of which lacks a column."""
    generator = np.random.default_rng(0)
    for name in NAMES:
        risk = generator.normal(size=40)
        table = {column: (risk + generator.normal(size=40)).round(2) for column in ("age", "pulse", "sugar")}
        table |= {"sex": generator.choice(["f", "m"], 40), "ill": np.where(risk > 0, "ill", "well")}
        pd.DataFrame(table).drop(columns=["pulse"] * (name == "west")).to_csv(folder / f"{name}.csv", index=False)
        sites.at[name] = SiteAgent(folder / f"site-{name}", name, folder / f"{name}.csv")
    yield sites
    for station in sites.at.values():
        station.close()
    sites.at = {}


PUBLIC = {"ill": ["ill", "well"], "sex": ["f", "m"], "age": [-6, 6], "pulse": [-6, 6], "sugar": [-6, 6]}


def private(folder: Path, method: str, **privacy: object):
    table = experiment(folder, "fedavg").model_dump(mode="json", exclude_none=True)
    data = {**table["data"], "public": PUBLIC}
    return validate({**table, "method": method, "data": data, "privacy": {"epsilon": 6.0, "delta": 1e-3, **privacy}})


def experiment(folder: Path, method: str):
    changes = METHODS[method]
    files = [str(folder / f"{name}.csv") for name in NAMES]
    data = {"name": "tables", "files": files, "target": "ill", "columns": "union", **changes.get("data", {})}
    plan, often = {"engine": "sequential", "threads": 1}, {"every": 10}
    table = {"method": method, "rounds": 1, "plan": plan, "evaluation": often, **changes, "data": data}
    return validate({**table, "model": {"body": {"kind": "hidden-layer", "out": 4}, "head": "linear"}})


@pytest.mark.parametrize("method", METHODS)
def test_a_method_ends_with_the_bits_of_a_simulation(method, federation, folder, stations):
    study, run = experiment(folder, method), folder / f"run-{method}"
    server_app.main(
        Remote(federation), {"out": str(run), "wait": PATIENT}, study=make_deployed_study(study, NAMES).to_toml()
    )
    same_bits(run, study, folder / f"simulated-{method}")


def test_a_blend_ends_with_the_weights_of_a_simulation(federation, folder, stations):
    """Of methods that are trained in folds, and of each site's own models; one site lacks a column."""
    candidates = ["fedavg-ft", "sklearn:logistic", "sklearn:gradient-boosting"]
    table = experiment(folder, "fedavg-ft").model_dump(mode="json", exclude_none=True)
    table |= {"baseline_tries": 1, "blend": {"folds": 2, "candidates": candidates}}
    text, run = make_deployed_study(validate(table), NAMES).to_toml(), folder / "run-blend"
    server_app.main(Remote(federation), {"out": str(run), "wait": PATIENT}, study=text)
    (folder / "blend.toml").write_text(validate(table).to_toml())
    simulated = folder / "simulated-blend"
    done = perfed("blend", folder / "blend.toml", "--methods", ",".join(candidates), "--out", simulated)
    assert done.code == 0, done.err
    expected = json.loads((simulated / "blend/seed-0/blend.json").read_text())["sites"]
    for name in NAMES:
        weights = load_site_model(folder / f"site-{name}", name, folder / f"{name}.csv").facts["weights"]
        assert weights == pytest.approx({n: weight for n, weight in expected[name].items() if weight > 0}, abs=2e-5)


def test_a_site_that_drops_out_under_masks_is_survived_and_comes_back(federation, folder, stations, monkeypatch):
    """West shares its secrets in round 1 and does not train; it is there again in round 2."""
    study, run = experiment(folder, "fedavg").model_copy(update={"rounds": 2}), folder / "run-dropped"
    west, failed = stations.at["west"].answer, list[bytes]()

    def answer(message: bytes) -> bytes:
        if b'"kind":"work"' in message and b'"secure"' in message and not failed:
            failed.append(message)
            raise PerfedError("the power is out")
        return west(message)

    monkeypatch.setattr(stations.at["west"], "answer", answer)
    server_app.main(
        Remote(federation), {"out": str(run), "wait": PATIENT}, study=make_deployed_study(study, NAMES).to_toml()
    )
    rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert [line["participants"] for line in rounds] == [["north", "south"], NAMES]
    assert failed and rounds[0]["counts"] == {"no_reply": ["west"]}


@pytest.mark.parametrize("unit", ["sample", "client"])
def test_a_private_run_under_masks_with_a_policy_at_each_site(unit, federation, folder, stations):
    """The acceptance of the issue on privacy: what was spent is known at both ends, and no loss and no metric left."""
    study = make_deployed_study(private(folder, "fedavg", unit=unit), NAMES).to_toml()
    run = folder / f"run-private-{unit}"
    policy = Policy(methods=("fedavg",), rows=20, epsilon=6.0, metrics=(), secure_aggregation=True)
    places = {name: folder / f"private-{unit}-{name}" for name in NAMES}
    for name in NAMES:
        stations.at[name].close()
        stations.at[name] = SiteAgent(places[name], name, folder / f"{name}.csv", study, policy=policy)
    server_app.main(Remote(federation), {"out": str(run), "wait": PATIENT}, study=study)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["rounds"] == 1 and summary["metrics"] == {}
    for name in NAMES:
        (told,) = read_ledger(places[name])
        spent = compute_ledger_epsilon([told], unit, 1e-3)
        assert 5.9 < spent <= 6.0 and summary["privacy"]["spent"][name] == pytest.approx(spent, rel=1e-6)
        text = card(load_site_model(places[name], name, folder / f"{name}.csv").facts)
        assert f"| {name} | not known here | {spent:.4g} |" in text
    with pytest.raises(PerfedError, match=r"the policy of this site does not allow .* \(epsilon\)"):
        server_app.main(Remote(federation), {"out": f"{run}-again", "wait": PATIENT}, study=study)


def test_private_runs_under_masks_end_with_a_verdict(federation, folder, stations):
    """The acceptance of the issue on privacy: two methods, a policy at each site, of metrics the noisy sum alone."""
    places, runs = {name: folder / f"verdict-{name}" for name in NAMES}, []
    policy = Policy(rows=20, epsilon=12.0, metrics=("accuracy",), secure_aggregation=True)
    for method in ("local", "fedavg"):
        study = make_deployed_study(private(folder, method, metrics="noisy"), NAMES).to_toml()
        for name in NAMES:
            stations.at[name].close()
            stations.at[name] = SiteAgent(places[name], name, folder / f"{name}.csv", study, policy=policy)
        runs.append(folder / f"verdict-{method}")
        server_app.main(Remote(federation), {"out": str(runs[-1]), "wait": PATIENT}, study=study)
    found = verdict(load_runs(runs))
    (gain,) = [of.gain for of in found.methods]
    sd = [json.loads((run / "summary.json").read_text())["privacy"]["noisy_metrics"]["sd"]["accuracy"] for run in runs]
    wide = 1.96 * (sd[0]["all sites"] ** 2 + sd[1]["all sites"] ** 2) ** 0.5
    assert gain.high - gain.mean == pytest.approx(wide, rel=1e-3) and "Metrics left the clients with noise" in str(
        found
    )
    assert all(6.1 < compute_ledger_epsilon(read_ledger(places[name]), "sample", 1e-3) <= 12.0 for name in NAMES)


class Rotating(Remote):
    """Before its third exchange north's key is barred, and north comes back with another."""

    def __init__(self, federation: Loopback, rotate: Callable[[], None]) -> None:
        super().__init__(federation)
        self.count, self.rotate = 0, rotate

    def exchange(self, messages, deadline, least=0):
        self.count += 1
        if self.count == 3:
            self.rotate()
        yield from super().exchange(messages, deadline)


def test_a_run_in_which_a_key_is_rotated_ends_with_the_bits_of_a_simulation(federation, folder, stations):
    """The site starts anew from what it has kept; Ditto's clients have models of their own."""
    study, run, said = experiment(folder, "ditto").model_copy(update={"rounds": 4}), folder / "run-rotated", []

    def rotate() -> None:
        before, station = federation.sites.pop("north"), stations.at["north"]
        before.close()
        station.close()
        home = folder / "server" / "home"
        words = [sys.executable, "-m", "perfed.sites.flower.revoke_keys", "perfed", "north"]
        done = subprocess.run(words, env={**os.environ, "FLWR_HOME": str(home)}, capture_output=True, text=True)
        said.append(done.stdout or done.stderr)
        with pytest.raises(PerfedError, match="does not know the key"):
            probe_server(federation.server(folder / "north"))
        (folder / "new").mkdir()
        private, public = site_key(folder / "new", "north")
        federation.register(public, "north")
        stations.at["north"] = SiteAgent(folder / "site-north", "north", folder / "north.csv")
        federation.add("north", partial(stations.answer, "north"), private, folder="north-again")
        assert federation.missing(NAMES, PATIENT) == []

    remote = Rotating(federation, rotate)
    server_app.main(remote, {"out": str(run), "wait": PATIENT}, study=make_deployed_study(study, NAMES).to_toml())
    assert said[0].splitlines()[-1] == "north: its key is barred"
    assert (run / "rounds.jsonl").read_text().count("\n") == 4
    same_bits(run, study, folder / "simulated-rotated")
    shutil.copy2(folder / "new" / "north", folder / "north")  # what the tests below take for north's key


EVIL = """
from pathlib import Path
from flwr.clientapp import ClientApp

def read(*_):
    Path({witness!r}).write_text(Path({key!r}).read_text())

read()
app = ClientApp()
for kind in (app.train, app.evaluate, app.query):
    kind()(read)
"""
EVIL_SERVER = """
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    kinds = ("train", "evaluate", "query", "query.exchange")
    for kind in kinds:
        messages = [Message(RecordDict(), node, kind, ttl=60) for node in grid.get_node_ids()]
        for reply in grid.send_and_receive(messages, timeout=30):
            said = dict(reply.content.config_records["error"])["error"] if reply.has_content() else reply.error
            print("evil heard:", said, flush=True)
"""


def test_an_app_that_is_submitted_runs_at_no_site(federation, folder):
    """One that reads a site's key when it is imported and when it is called; the other run does not notice."""
    witness, lines = folder / "witness", []
    app = write_app(folder / "evil")
    (app / "toy" / "client.py").write_text(EVIL.format(witness=str(witness), key=str(folder / "north")))
    (app / "toy" / "server.py").write_text(EVIL_SERVER)
    project = app / "pyproject.toml"
    project.write_text(project.read_text().replace('clientapp = "toy.server', 'clientapp = "toy.client'))
    run = federation.submitter.submit(app, {})
    assert federation.submitter.follow_log(run, lines.append, 120) == "finished:completed"
    heard = [line.partition("evil heard: ")[2] for line in lines if "evil heard: " in line]
    assert not witness.exists()
    assert heard == [RefusalReason.MESSAGE] * 4 * len(NAMES)
    sources = [path for path in app.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    files = {path.relative_to(app).as_posix(): path.read_text() for path in sources}
    for site in federation.sites.values():
        assert site.heard[-4:] == [f"a message is refused, and the server receives: {RefusalReason.MESSAGE}"] * 4
        kinds = [f"a message of type '{kind}'" for kind in ("train", "evaluate", "query")]
        assert [note.partition(";")[0] for note in site.notes[-4:]] == [*kinds, "a message without a body"]
    assert all(site.apps[-1] == hash_bundle(files) != site.apps[0] for site in federation.sites.values())
    assert {site: text for site, (text, _, _) in federation.exchange(HEARD, PATIENT).items()} == {
        "north": "N", "south": "S", "west": "W",
    }  # fmt: skip


def test_a_superlink_that_is_killed_and_started_again_interrupts_nothing(federation):
    """Outcome: the exchange that was under way when it was killed ends with all replies; the run goes on."""
    results = {}
    orders = {"north": "n", "west": "sleep 5"}
    exchange = threading.Thread(target=lambda: results.update(federation.exchange(orders, 120)))
    exchange.start()
    time.sleep(3)
    federation.kill_link()
    federation.start_link()
    exchange.join(130)
    assert {site: tuple(said[:2]) for site, said in results.items()} == {"north": ("N", ""), "west": ("SLEEP 5", "")}
    assert federation.submitter.read_status(federation.run) == "running"


def nobody(notes: list[str]) -> MessageHandler:
    return MessageHandler("x", "nowhere", handle, print, notes.append)


def refusal(server: ServerAddress) -> str:
    stop = threading.Event()
    timer = threading.Timer(20, stop.set)
    timer.start()
    with pytest.raises(PerfedError) as error:
        serve_messages(server, nobody([]), stop)
    timer.cancel()
    assert type(error.value) is not Unreachable
    return str(error.value)


def test_what_will_not_mend_is_said_in_one_line(federation, folder, authority):
    address = federation.address
    stranger, _ = site_key(folder, "stranger")
    good = federation.server(folder / "north")
    probe_server(good)
    says = {
        "wrong key": (ServerAddress(address, good.ca, stranger), f"does not know the key in {stranger}"),
        "no key": (ServerAddress(address, good.ca), "authenticates its sites: this site needs its key"),
        "no authority": (ServerAddress(address), "speaks TLS: this site needs the certificate of its authority"),
        "another authority": (
            ServerAddress(address, Authority(folder / "other").ca, good.key),
            "is not signed by the auth",
        ),
        "wrong name": (
            ServerAddress(address.replace("127.0.0.1", "localhost"), good.ca, good.key),
            "not for 'localhost'",
        ),
        "no port": (ServerAddress("127.0.0.1", good.ca, good.key), "write HOST:PORT"),
        "no file": (ServerAddress(address, folder / "missing.crt", good.key), "not the certificate of an authority"),
        "not a key": (ServerAddress(address, good.ca, good.ca), "not a private key of an elliptic curve"),
    }
    for case, (server, words) in says.items():
        line = refusal(server)
        assert words in line and "\n" not in line, (case, line)


def test_an_expired_certificate_is_said_in_one_line(folder, authority):
    expired = authority.server("expired", days=-1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(expired.certificate, expired.key)
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor() as pool:

        def shake() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                context.wrap_socket(connection, server_side=True)

        pool.submit(shake)
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert "its certificate, or its authority's, has expired" in refusal(ServerAddress(address, authority.ca))


def test_a_server_that_is_not_there_is_waited_for(folder, connections):
    address, notes, stop = f"127.0.0.1:{free_port()}", [], threading.Event()
    thread = threading.Thread(target=serve_messages, args=(ServerAddress(address), nobody(notes), stop))
    thread.start()
    until(lambda: bool(notes), 10)
    assert notes == [f"server {address} is not reachable: Connection refused; trying again"]
    stop.set()
    thread.join(5)
    assert not thread.is_alive()
    with pytest.raises(PerfedError, match=f"server {address}: .*unavailable"):
        Submitter(folder / "gone" / "home", address).read_status(1)


def test_the_run_ends_with_its_true_status(federation):
    lines = []
    federation.order(10, do="stop")
    assert federation.submitter.follow_log(federation.run, lines.append, 60) == "finished:completed"
    said = [line for line in lines if "the server program" in line]
    assert said == ["the server program is here", "the server program is done"]


def test_a_server_program_that_fails_is_not_taken_for_a_success(federation, folder):
    app = write_app(folder / "failing-app")
    broken = SERVER.replace("def do(order):", "raise SystemError('no server here')\n    def do(order):")
    (app / "toy" / "server.py").write_text(broken)
    submitter = federation.submitter
    assert submitter.follow_log(submitter.submit(app, {}), print, 60) == "finished:failed"


def test_nobody_was_called_but_this_machine(connections):
    """Last in the file: what all processes of the tests above have connected to, or asked the address of."""
    called = [ast.literal_eval(line) for line in connections.read_text().splitlines()]
    assert len(called) > 50
    own = {"127.0.0.1", "localhost"}  # the second by the wrong name of a test above
    assert {host for host in called if not str(host).startswith("/")} == own
