"""``perfed site log``: its head, and its export, which shows whose it is and that nothing was changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import perfed

from perfed.sites.flower.audit_log import OutgoingLog
from perfed.sites.flower.hash_chain import LOG, read_log
from perfed.sites.flower.message import pack

tls = pytest.importorskip("perfed.sites.deploy.tls")
pytest.importorskip("cryptography", reason="needs the extra flower")


@pytest.fixture
def site(tmp_path) -> Path:
    """The folder of a site with a key, whose log has three lines."""
    for name in ("north", "south"):
        tls.make_site_key(tmp_path / f"{name}.key", tmp_path / f"{name}.pub", name)
    folder = tmp_path / "at-north"
    folder.mkdir()
    known = {"name": "north", "data": str(tmp_path / "north.csv"), "key": str(tmp_path / "north.key")}
    (folder / "site.json").write_text(json.dumps(known))
    with OutgoingLog(folder / LOG) as log:
        log.add_note("site 'north' has started")
        log.record_arrival(pack({"kind": "work", "run": "flic-1", "round": 3, "program": "train"}, {}))
        log.append(pack({"kind": "error", "error": "the site does not answer such a message"}, {}))
    return folder


def test_the_log_lists_what_arrived_and_what_left(site):
    lines = perfed("site", "log", "--dir", site).out.splitlines()
    assert "note: site 'north' has started" in lines[0]
    assert "arrived: kind work, round 3, program train: " in lines[1]
    assert "the site does not answer such a message" in lines[2] and "3 lines; the chain is whole" in lines[3]


def test_a_server_moves_no_cursor_where_the_log_is_read(site):
    """Two characters of control erase the line before."""
    with OutgoingLog(site / LOG) as log:
        log.record_arrival(pack({"kind": "work", "program": "train\x1b[1A\x1b[2K\r", "round": 3}, {}))
    said = perfed("site", "log", "--dir", site).out
    assert "\x1b" not in said and "\r" not in said and "program train\\x1b[1A\\x1b[2K\\r: " in said


def test_the_head_stands_alone(site):
    assert perfed("site", "log", "--head", "--dir", site).out.strip() == read_log(site / LOG)[-1]["hash"]


def exported(site: Path) -> Path:
    done = perfed("site", "log", "--export", site.parent / "exported.json", "--dir", site)
    assert done.code == 0, done.err
    return site.parent / "exported.json"


def verified(file: Path, key: str) -> tuple[int, str]:
    done = perfed("site", "log", "--verify", file, "--key", file.parent / key)
    return done.code, done.out + done.err


def test_an_exported_log_is_verified_with_the_sites_public_key(site):
    file = exported(site)
    code, said = verified(file, "north.pub")
    assert code == 0 and "site north: 3 lines; the chain is whole" in said and "signed with the key of" in said
    code, said = verified(file, "south.pub")
    assert code == 2 and "is not signed with the key of" in said
    done = perfed("site", "log", "--verify", file)
    assert done.code == 0 and "its signature was not looked at" in done.out
    done = perfed("site", "log", "--export", file, "--dir", site)
    assert done.code == 2 and "exists already" in done.err


def changed_line(content: dict[str, str]) -> None:
    content["log"] = content["log"].replace('"round":3', '"round":4')


def lines_removed(content: dict[str, str]) -> None:
    content["log"] = content["log"].splitlines(keepends=True)[0]


def made_anew(content: dict[str, str]) -> None:
    """A log of one line, whole, with its own head, under the old signature."""
    lines_removed(content)
    content["head"] = json.loads(content["log"])["hash"]


def other_site(content: dict[str, str]) -> None:
    content["site"] = "west"


def unsigned(content: dict[str, str]) -> None:
    del content["signature"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed_line, "line 2 has been changed"),
        (lines_removed, "it does not end with its last hash"),
        (made_anew, "is not signed"),
        (other_site, "is not signed"),
        (unsigned, "is not signed"),
    ],
)
def test_an_exported_log_that_was_changed_shows(change, said, site):
    file = exported(site)
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    code, found = verified(file, "north.pub")
    assert code == 2 and said in " ".join(found.split())


@pytest.mark.long
def test_what_is_no_exported_log_or_key_is_said_in_one_line(site):
    file = exported(site)
    other = site.parent / "other.json"
    for text in ("", "[]", "{}", '{"site": 1, "log": "é"}'):
        other.write_text(text)
        assert verified(other, "north.pub")[0] == 2
    code, said = verified(file, "exported.json")
    assert code == 2 and "cannot be read as a site's public key" in " ".join(said.split())
    done = perfed("site", "log", "--key", site.parent / "north.pub", "--dir", site)
    assert done.code == 2 and "--key with --verify alone" in done.err
    (site / "site.json").write_text(json.dumps({"name": "north", "data": "x"}))
    done = perfed("site", "log", "--export", site.parent / "plain.json", "--dir", site)
    assert done.code == 0 and "not signed: the site has no key" in " ".join(done.out.split())
