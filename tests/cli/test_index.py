"""What ``perfed list`` reads is what these sources say: made at first use and kept, never another checkout's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import perfed
from perfed.cli import index as module
from perfed.cli.index import index

NAME = "digits-label-skew"
LIST = ("-m", "perfed", "list", "experiments", "--json")


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A folder with a copy of perfed, and beside it the home of a user who has nothing yet."""
    shutil.copytree(Path(perfed.__file__).parent, tmp_path / "checkout" / "perfed")
    (tmp_path / "home").mkdir()
    return tmp_path / "checkout"


def started(checkout: Path, *words: str) -> subprocess.Popen[str]:
    """``python WORDS`` with that perfed and that user, who is elsewhere."""
    home = checkout.parent / "home"
    known = {**os.environ, "PYTHONPATH": str(checkout), "HOME": str(home)}
    return subprocess.Popen([sys.executable, *words], cwd=home, env=known, stdout=-1, stderr=-1, text=True)


def python(checkout: Path, *words: str) -> str:
    process = started(checkout, *words)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def kept(checkout: Path) -> list[Path]:
    return sorted((checkout.parent / "home" / ".cache" / "perfed").glob("*"))


def described(checkout: Path) -> str:
    """What the list says of an experiment."""
    (found,) = [item["summary"] for item in json.loads(python(checkout, *LIST)) if item["name"] == NAME]
    return str(found)


@pytest.mark.sampled(2)
def test_it_is_of_the_sources_that_are_there_whatever_was_kept(checkout):
    file = checkout / "perfed" / "experiment" / "shipped" / f"{NAME}.toml"
    before, text = described(checkout), file.read_text()
    assert before and before in text
    times = file.stat()
    file.write_text(text.replace(before, before[::-1]))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # neither time nor size has changed
    assert described(checkout) == before[::-1]
    file.write_text(text)
    known = kept(checkout)
    assert described(checkout) == before and kept(checkout) == known


@pytest.mark.long
def test_the_index_says_what_the_registries_say():
    """In a process of its own: here tests may have registered something."""
    program = "import json; from perfed.cli.listing import build_lists; print(json.dumps(build_lists(), default=str))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {name: value for name, value in index().items() if name != "sources"} == json.loads(done.stdout)


@pytest.mark.long
def test_two_processes_make_it_at_once_and_a_third_reads_it(checkout):
    outputs = {process.communicate()[0] for process in [started(checkout, *LIST), started(checkout, *LIST)]}
    (file,) = kept(checkout)
    assert outputs == {python(checkout, *LIST)} and json.loads(file.read_text())["sources"]


@pytest.mark.parametrize("content", [b"", b'{"methods": [', b"[]", b'{"sources": "of others"}', b"\xff\xfe"])
def test_what_is_damaged_is_made_anew(monkeypatch, tmp_path, content):
    """In this process: what makes the lists is replaced by what tells that it was asked."""
    made = {"sources": module.digest_of_sources(), "engines": ["made anew"]}
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, json.dumps(made))
    )
    read = index.__wrapped__  # what is not remembered
    assert read() == made
    (file,) = (tmp_path / ".cache" / "perfed").iterdir()
    for spoil in (lambda: file.write_bytes(content), file.unlink):
        spoil()
        assert read() == made and json.loads(file.read_text()) == made


@pytest.mark.sampled(2)
def test_it_goes_without_a_place_to_keep_it_and_says_so(checkout):
    (checkout.parent / "home" / ".cache").write_text("a file in the folder's place")
    process = started(checkout, *LIST)
    out, err = process.communicate()
    assert process.returncode == 0 and NAME in out
    assert "cannot be kept" in err and len(err.splitlines()) == 1


@pytest.mark.long
def test_it_is_made_without_what_is_of_the_user(checkout):
    home = checkout.parent / "home"
    (home / "torch.py").write_text("raise RuntimeError('a file of the user was imported')\n")
    own = "from perfed import register\nfrom perfed.methods.fedavg import FedAvg\n\n\n"
    (home / "mine.py").write_text(f"{own}@register('mine')\nclass Mine(FedAvg):\n    'A method of mine.'\n")
    assert "A method of mine" in python(checkout, "-P", "-m", "perfed", "show", "mine:Mine")
    assert "mine" not in {item["name"] for item in json.loads(kept(checkout)[0].read_text())["methods"]}


@pytest.mark.long
def test_a_mistake_in_the_sources_is_one_line(checkout):
    file = checkout / "perfed" / "methods" / "fedavg.py"
    file.write_text(file.read_text() + "\nraise RuntimeError('half an edit')\n")
    process = started(checkout, *LIST)
    _, err = process.communicate()
    assert process.returncode == 2 and "half an edit" in err and len(err.splitlines()) == 1
    assert not kept(checkout)
