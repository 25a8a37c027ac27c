"""``perfed deploy --rotate``: a site's new key, and nothing else of a deployment changes."""

from __future__ import annotations

import stat
import subprocess

import pytest
from command_line import contents, perfed
from deployments import deployed

pytest.importorskip("cryptography", reason="needs the extra flower")


@pytest.fixture
def folder(tmp_path):
    return deployed(tmp_path, "--tls", "--host", "fed.example.org")


def said_of(public) -> str:
    return subprocess.run(["ssh-keygen", "-l", "-f", public], capture_output=True, text=True, check=True).stdout


def test_a_site_has_a_new_key_and_its_page_the_fingerprint(folder):
    (folder / "tls/ca.key").unlink()  # kept elsewhere, as the site's key is once it was handed on
    (folder / "sites/north/north.key").unlink()
    before = contents(folder)
    old = said_of(folder / "server/keys/north.pub").split()[1]
    done = perfed("deploy", "--rotate", "north", folder)
    assert done.code == 0, done.err
    server = folder / "server"
    assert done.out.splitlines()[-2:] == [f"sh {server / 'bar.sh'} north", f"sh {server / 'register.sh'} north"]
    after = contents(folder)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed == {"sites/north/north.key", "server/keys/north.pub", "sites/north/README.md"}
    key = folder / "sites/north/north.key"
    new = said_of(folder / "server/keys/north.pub").split()[1]
    assert new == said_of(key).split()[1] != old and stat.S_IMODE(key.stat().st_mode) == 0o600
    page = (folder / "sites/north/README.md").read_text()
    assert f"| `{new}` |" in page and new in done.out
    assert page.replace(new, old).encode() == before["sites/north/README.md"]


def test_what_has_no_key_of_a_site_is_refused_and_left_alone(folder, tmp_path):
    before = contents(folder)
    done = perfed("deploy", "--rotate", "east", folder)
    assert done.code == 2 and "--rotate east: no such site; allowed: north, south, west" in done.err
    assert contents(folder) == before
    (tmp_path / "trial").mkdir()
    trial = deployed(tmp_path / "trial")
    done = perfed("deploy", "--rotate", "north", trial)
    assert done.code == 2 and "this deployment has no TLS" in " ".join(done.err.split())
    done = perfed("deploy", "--rotate", "north", tmp_path / "nowhere")
    assert done.code == 2 and "nowhere" in done.err
