"""What sites and the server write is for their users alone; what simulations write is as the user has it."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator

import pytest
from command_line import perfed
from deployments import deployed, open_to_others
from stations import COLUMNS, TABLE, Stations, study, submit

from perfed.experiment.config import validate
from perfed.experiment.start import start

pytestmark = pytest.mark.skipif(os.name == "nt", reason="files have no such modes on Windows")


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """The usual one, under which others may read."""
    before = os.umask(0o022)
    yield
    os.umask(before)


class Heard(Stations):
    """Stations that keep what the server has sent to north."""

    messages: list[bytes]

    def exchange(self, messages, deadline, least=0):
        self.messages = [*getattr(self, "messages", []), messages["north"]]
        return super().exchange(messages, deadline)


@pytest.mark.long
def test_what_a_site_writes(tables, monkeypatch):
    """Asked what the server has asked another site of its name and table."""
    pytest.importorskip("flwr", reason="needs the extra flower")
    text = study(tables)
    heard = submit(tables, text, Heard(tables))
    (tables / "study.toml").write_text(text)

    def attended(server, at, stop):
        for message in heard.messages:
            at.answer(message)

    monkeypatch.setattr("perfed.sites.flower.node.serve_messages", attended)
    options = ("--data", tables / "north.csv", "--server", "127.0.0.1:9", "--name", "north", "--consent", "yes")
    options += ("--study", tables / "study.toml")
    done = perfed("site", *options, "--dir", tables / "site")
    assert done.code == 0, done.err
    (run,) = (tables / "site/runs").iterdir()
    written = {path.name for path in (tables / "site").iterdir()}
    assert list(run.glob("*.exchange")) and {"site.json", "run.json", "outgoing.jsonl"} <= written
    assert not open_to_others(tables / "site")
    assert perfed("site", "export", "--dir", tables / "site", "--format", "safetensors").code == 0
    assert (tables / "site/north.safetensors").exists() and not open_to_others(tables / "site")


@pytest.mark.long
def test_what_the_server_writes(tables):
    submit(tables, study(tables))
    written = {path.relative_to(tables / "run").parts[0] for path in (tables / "run").rglob("*") if path.is_file()}
    assert {"journal", "checkpoint", "agreed.json", "rounds.jsonl", "report.html"} <= written
    assert not open_to_others(tables / "run")


@pytest.mark.long
def test_what_a_simulation_writes_is_as_the_user_has_it(tables):
    submit(tables, study(tables))
    files = [str(tables / f"{site}.csv") for site in COLUMNS]
    table = {**TABLE, "data": {"name": "tables", "files": files, "target": "ill"}}
    start(validate(table), out=tables / "own").execute()
    assert stat.S_IMODE((tables / "own").stat().st_mode) == 0o755
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tables / "own").glob("*.json")} == {0o644}


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--tls",)], ids=["trial", "tls"])
def test_a_deployment(tmp_path, options):
    if options:
        pytest.importorskip("cryptography", reason="needs the extra flower")
    folder = deployed(tmp_path, *options)
    assert not open_to_others(folder)
    assert perfed("deploy", "--extend", folder, "--sites", "east").code == 0
    if options:
        assert perfed("deploy", "--renew", folder).code == 0
    assert (folder / "sites/east").is_dir() and not open_to_others(folder)


@pytest.mark.parametrize("script", ["superlink", "superexec"])
def test_what_flowers_programs_write_at_the_server(tmp_path, script):
    """With a program of Flower's name that writes a file and makes a folder."""
    server = deployed(tmp_path) / "server"
    program = server.parent / f"venv/bin/flower-{script}"
    program.parent.mkdir(parents=True)
    made = server / "state"
    program.write_text(f"#!/bin/sh\nmkdir -p {made}/files\necho > {made}/superlink.db\n")
    program.chmod(0o755)
    subprocess.run(["sh", server / f"{script}.sh"], check=True)
    assert (made / "superlink.db").exists() and not open_to_others(made)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused(tmp_path, monkeypatch, mode):
    table, key = tmp_path / "north.csv", tmp_path / "north.key"
    table.write_text("age,ill\n61,yes\n48,no\n70,yes\n55,no\n")
    key.write_text("a key\n")
    key.chmod(mode)
    monkeypatch.setattr("perfed.sites.deploy.site_agent.run_site", lambda settings, note, stop: None)
    options = ("--data", table, "--server", "127.0.0.1:9", "--name", "north", "--dir", tmp_path / "site")
    options += ("--any-study", "--consent", "any")
    done = perfed("site", *options, "--key", key)
    said = f"--key {key}: others can read or write this private key; 'chmod 600 {key}' mends that"
    assert done.code == 2 and done.err.count("\n") == 1 and said in done.err, done.err
    assert not (tmp_path / "site").exists()
    key.chmod(0o600)
    assert perfed("site", *options, "--key", key).code == 0
