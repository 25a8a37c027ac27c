"""A site's key is rotated at a real SuperLink: the scripts of a deployment bar the old one."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra flower")

from perfed.errors import PerfedError
from perfed.experiment.config import validate
from perfed.sites.deploy.deployment import Deployment
from perfed.sites.deploy.write import deploy, rotate
from perfed.sites.flower.probe import ServerAddress, Unreachable, probe_server

pytestmark = [pytest.mark.network, pytest.mark.long]
SITES = ("north", "south")
ROOT = Path(__file__).parents[3]
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "PYTHONPATH": str(ROOT),
}


@pytest.fixture
def server(tmp_path):
    """A deployment whose SuperLink answers, and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    parts = {"embedding": {"kind": "linear", "out": 4}, "body": {"kind": "hidden-layer", "out": 4}, "head": "linear"}
    data = {"name": "tables", "files": ["a.csv"], "target": "ill"}
    table = {"method": "flic-hl", "rounds": 1, "data": data, "model": parts}
    folder = tmp_path / "deployment"
    deployment = Deployment("rotation", SITES, str(folder), tls=True, host="127.0.0.1", superlink_port=port)
    deploy(validate(table), deployment, folder)
    with (tmp_path / "log").open("wb") as log:
        running = subprocess.Popen(
            ["sh", folder / "server/superlink.sh"], env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield folder, f"127.0.0.1:{port}"
        finally:
            running.terminate()
            running.wait(30)


def known(address: str, authority: Path, key: Path) -> bool:
    """Whether the SuperLink knows the key; it is waited for."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        with suppress(Unreachable):
            try:
                probe_server(ServerAddress(address, authority, key))
            except Unreachable:
                raise
            except PerfedError as error:
                assert "does not know the key" in str(error)
                return False
            return True
        time.sleep(0.2)
    raise AssertionError("no SuperLink")


def test_the_old_key_is_barred_and_the_new_one_known(server, tmp_path):
    folder, address = server
    authority, old, south = folder / "tls/ca.crt", tmp_path / "old.key", folder / "sites/south/south.key"
    new = folder / "sites/north/north.key"

    def run(script: str, *names: str) -> str:
        words = ["sh", folder / "server" / script, *names]
        done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    assert not known(address, authority, new)
    run("register.sh", *SITES)
    assert known(address, authority, new) and known(address, authority, south)
    shutil.copy2(new, old)
    rotate(folder, "north")
    assert known(address, authority, old) and not known(address, authority, new)
    assert run("bar.sh", "north") == "north: its key is barred"
    assert run("register.sh", "north") == "north: its key is known now"
    assert not known(address, authority, old) and known(address, authority, new) and known(address, authority, south)
    assert run("bar.sh", "west") == "west: no key of it was known"
