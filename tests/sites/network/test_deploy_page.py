"""docs/tutorials/deploy.md as it stands: a server and three sites with TLS, killed and brought back."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra flower")

from loopback import same_bits

from perfed.experiment.config import find_experiment, validate
from perfed.experiment.overrides import override
from perfed.sites.deploy.submit import is_running
from perfed.sites.flower.hash_chain import read_log, verify_log

pytestmark = [pytest.mark.network, pytest.mark.long]
ROOT = Path(__file__).parents[3]
PAGES = ("tutorials/deploy.md", "howto/site.md")
TEXT = "\n".join((ROOT / "docs" / page).read_text() for page in PAGES)
NAMES = ("north", "south", "west")
ROUNDS = 5
EXACT = ["plan.engine=sequential", "plan.threads=1", "evaluation.every=10"]


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", TEXT, flags=re.DOTALL)


class Place:
    """A folder in which the page's commands are run, and what runs in its terminals."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        tools = [str(Path(sys.executable).parent), os.environ["PATH"]]
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join(tools),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def words(self, line: str) -> list[str]:
        """The command of the page, with a port that is free."""
        given = shlex.split(line.replace(":8000", f":{self.port}"))
        return [sys.executable, "-m", "perfed", *given[1:]] if given[0] == "perfed" else given

    def run(self, line: str, *more: str, seconds: float = 200.0) -> str:
        done = subprocess.run(
            [*self.words(line), *more],
            cwd=self.path,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout

    def begin(self, line: str) -> None:
        """In a terminal of its own."""
        log = (self.path / f"terminal-{len(self.running)}.log").open("ab")
        self.running[line] = subprocess.Popen(
            self.words(line), cwd=self.path, env=self.environment, stdout=log, stderr=log, start_new_session=True
        )

    def serve(self) -> None:
        """Start SuperLink and SuperExec, and wait until they answer."""
        for line in SERVER:
            self.begin(line)
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.2)

    def kill(self, line: str) -> None:
        child = self.running.pop(line)
        child.kill()
        child.wait()

    def close(self) -> None:
        for child in self.running.values():
            os.killpg(child.pid, signal.SIGTERM)
        for child in self.running.values():
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)

    def rounds(self) -> int:
        file = self.path / "deployment/server/run/rounds.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0


SHELL = [line for block in blocks("sh") for line in block.splitlines() if line.strip()]
DEPLOY, *_ = [line for line in SHELL if line.startswith("perfed deploy")]
SERVER = [line for line in SHELL if line.startswith("sh deployment/server/super")]
SITES = [f"{line} --consent yes" for line in SHELL if line.startswith("perfed site --data")]  # nobody is there to type


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    here = Place(tmp_path_factory.mktemp("page"))
    (here.path / "tables.py").write_text(blocks("python")[0])
    subprocess.run([sys.executable, "tables.py"], cwd=here.path, check=True)
    here.run(next(line for line in SHELL if line.startswith("perfed init")))
    here.run(DEPLOY.replace("rounds=10", f"rounds={ROUNDS}"), "--superlink-port", str(here.port), *EXACT)
    try:
        here.serve()
        here.run(next(line for line in SHELL if "register.sh" in line))
        for line in SITES:
            here.begin(line)
        yield here
    finally:
        here.close()


def submitted(place: Place, rounds: int) -> subprocess.Popen[str]:
    """``perfed submit``, when so many rounds are done."""
    submitting = subprocess.Popen(
        place.words("perfed submit deployment --wait 150"),
        cwd=place.path,
        env=place.environment,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    ends = time.monotonic() + 300
    while place.rounds() < rounds and time.monotonic() < ends:
        time.sleep(0.2)
    assert place.rounds() >= rounds
    return submitting


@pytest.mark.xdist_group("page")
def test_the_study_is_simulated_first(place):
    compare = next(line for line in SHELL if line.startswith("perfed compare study.toml"))
    assert "report: " in place.run(compare.replace("rounds=20", "rounds=1"))


@pytest.mark.xdist_group("page")
def test_a_site_and_the_server_are_killed_and_brought_back_to_the_same_bits(place):
    """SIGKILL of a site, and of SuperLink and SuperExec with the run; then the page's commands again, and its end."""
    submitting = submitted(place, 1)
    os.killpg(submitting.pid, signal.SIGKILL)
    submitting.wait()
    for line in (SITES[0], *SERVER):
        place.kill(line)
    done = place.rounds()
    assert done < ROUNDS
    ends = time.monotonic() + 60
    while is_running(place.path / "deployment/server/run") and time.monotonic() < ends:
        time.sleep(0.2)  # until the server's program has noticed that nobody holds it
    place.serve()
    place.begin(SITES[0])
    following = submitted(place, done + 1)
    ended = place.run(next(line for line in SHELL if line.endswith("--stop")))
    assert re.search(rf"was ended after round [{done + 1}-{ROUNDS}]; 'perfed submit deployment' goes on", ended)
    assert "somebody has ended the run; submit again" in following.communicate(timeout=60)[1]
    assert following.returncode == 2
    said = place.run("perfed submit deployment", "--wait", "150", seconds=400)
    assert f"round {ROUNDS} of {ROUNDS}" in said and "continues from round" in said
    run = place.path / "deployment/server/run"
    settings = ["method=flic-hl", f"rounds={ROUNDS}", *EXACT]
    study = validate(override(find_experiment(str(place.path / "study.toml")), settings, ["flic-hl"]))
    same_bits(run, study, place.path / "simulated")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["rounds"] == ROUNDS and summary["virtual_time"] > 0 and (run / "report.html").exists()
    assert not (run / "predictions").exists()  # what models say of single rows stays at the sites


def owned_sockets(pid: int) -> set[str]:
    """Inodes of the sockets that a process has open."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            links.append(os.readlink(entry))
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def listening() -> set[str]:
    """Inodes of all sockets of this machine that others can call."""
    found = set()
    for name, state, inode, sign in (("tcp", 3, 9, "0A"), ("tcp6", 3, 9, "0A"), ("unix", 3, 6, "00010000")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[state] == sign:
                found.add(words[inode])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.xdist_group("page")
def test_another_user_of_a_site_s_machine_finds_nothing_to_call_or_to_read(place):
    """While sites are connected: what others could call, and what they see of processes."""
    for line in SITES:
        pid, ends = place.running[line].pid, time.monotonic() + 60
        while not (sockets := owned_sockets(pid)) and time.monotonic() < ends:
            time.sleep(0.2)  # until it has connected
        assert sockets and not sockets & listening()
        assert Path(f"/proc/{pid}/task/{pid}/children").read_text() == ""
        assert Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0") == place.words(line)
    if os.getuid():
        pytest.skip("to be another user takes root")
    for what in (f"/proc/{pid}/fd", f"/proc/{pid}/environ"):
        done = subprocess.run(["cat", what], user=65534, group=65534, extra_groups=[], capture_output=True, text=True)
        assert "Permission denied" in done.stderr and not done.stdout


@pytest.mark.xdist_group("page")
def test_the_site_has_its_log_and_its_model(place):
    """While the sites go on, as the page has it."""
    for line in SHELL:
        if line.startswith(("perfed site log", "perfed site export")):
            place.run(line)
    log = place.path / "perfed-site-north/outgoing.jsonl"
    assert verify_log(log) is None
    names = {entry["name"] for line in read_log(log) for entry in line.get("entries", []) if line["run"]}
    assert not [name for name in names if "embedding" in name or ("head" in name and "flic" in name)]
    assert (place.path / "perfed-site-north/north.onnx").exists()
    printed = [file.read_text() for file in place.path.glob("terminal-*.log")]
    told = [f"connected to server 127.0.0.1:{place.port}" in text for text in printed if "what leaves is in" in text]
    assert len(told) == len(NAMES) and all(told)
