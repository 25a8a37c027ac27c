"""``perfed data list | get | where``, with a server on loopback in the publishers' place."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from command_line import perfed
from faults import full_after

from perfed.data.originals.sources import SOURCES, Original, Source

TWEETS = "\n".join(
    (
        "tweet_id,airline_sentiment,airline_sentiment_confidence,airline,name,text",
        "2,negative,1.0,Delta,ann,@JetBlue late again",
        "1,positive,0.5,United,ben,@united thanks",
    )
).encode()


class Publisher:
    """A server with files by path; ``faults`` says how each of its answers goes wrong, the last one from then on."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.faults: list[str] = []
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append(request.path)
        fault = self.faults[0] if self.faults else ""
        self.faults = self.faults[1:] or self.faults
        content = self.files.get(request.path)
        if content is None:
            return request.send_error(404)
        if fault == "reset":
            request.connection.shutdown(socket.SHUT_RDWR)
            return None
        request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content[: len(content) // 2] if fault == "half" else content)
        if fault == "half":
            request.wfile.flush()
            request.connection.shutdown(socket.SHUT_RDWR)
        return None


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """A user who has nothing yet, in an empty folder; no wait between two tries."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PERFED_DATA", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return Path(tmp_path / "home")


def left(home: Path) -> list[str]:
    """All files of the user, but for lists of what perfed knows."""
    found = (path for path in home.rglob("*") if path.is_file() and not path.name.startswith("index-"))
    return sorted(str(path.relative_to(home / ".cache" / "perfed")) for path in found)


def refused(done, *says: str) -> None:
    assert done.code == 2, done.out
    assert done.err.startswith("perfed: ") and done.err.count("\n") == 1, done.err
    for text in says:
        assert text in done.err, done.err


@pytest.mark.long
def test_one_command_and_the_data_set_loads(publisher, home):
    publisher.files["/tweets/Tweets.csv"] = TWEETS
    done = perfed("data", "get", "tweets", "--mirror", publisher.url)
    assert done.code == 0, done.err
    assert left(home) == ["airline_tweets.npz", "originals/tweets/Tweets.csv", "originals/tweets/checksums.json"]
    (kept,) = json.loads((home / ".cache/perfed/originals/tweets/checksums.json").read_text()).values()
    assert kept in done.out and "checksum unknown" in done.out and "not quite the arrays" in done.out
    with np.load(home / ".cache/perfed/airline_tweets.npz") as file:
        assert file["text_utf8"].tobytes().decode().split("\n") == ["@united thanks", "@JetBlue late again"]
    again = perfed("data", "get", "tweets", "--mirror", publisher.url)
    assert "is there" in again.out and len(publisher.asked) == 1
    assert "airline_tweets.npz" in perfed("data", "where", "tweets").out
    # made anew: the original is not downloaded a second time
    assert perfed("data", "get", "tweets", "--mirror", publisher.url, "--again").code == 0 and len(publisher.asked) == 1


@pytest.mark.long
def test_a_second_download_is_compared_with_the_first(publisher, home):
    publisher.files["/tweets/Tweets.csv"] = TWEETS
    assert perfed("data", "get", "tweets", "--mirror", publisher.url).code == 0
    (home / ".cache/perfed/originals/tweets/Tweets.csv").unlink()
    before = left(home)
    publisher.files["/tweets/Tweets.csv"] = TWEETS.replace(b"late", b"soon")
    refused(perfed("data", "get", "tweets", "--mirror", publisher.url, "--again"), "another checksum than sha256:")
    assert left(home) == before
    publisher.files["/tweets/Tweets.csv"] = TWEETS
    done = perfed("data", "get", "tweets", "--mirror", publisher.url, "--again")
    assert done.code == 0 and "checksum as kept" in done.out


@pytest.mark.long
def test_a_damaged_original_that_nobody_can_check_is_no_dead_end(publisher, home):
    """It came as the publisher had it then, and stays: the message says how to be rid of it, and that is enough."""
    kept = home / ".cache/perfed/originals/tweets"
    publisher.files["/tweets/Tweets.csv"] = b"tweet_id,text\n1,a\n"
    refused(perfed("data", "get", "tweets", "--mirror", publisher.url), f"; delete {kept} to download them again")
    publisher.files["/tweets/Tweets.csv"] = TWEETS
    refused(perfed("data", "get", "tweets", "--mirror", publisher.url), f"; delete {kept} to download them again")
    (kept / "Tweets.csv").unlink()  # not the folder, which has the checksum too
    refused(perfed("data", "get", "tweets", "--mirror", publisher.url), f"; delete {kept} to take this one")
    shutil.rmtree(kept)
    assert perfed("data", "get", "tweets", "--mirror", publisher.url).code == 0


@pytest.mark.parametrize(("fault", "says"), [("reset", ("Tweets.csv did not come",)), ("half", ("did not come",))])
@pytest.mark.parametrize("times", [1, 2, 99])
def test_a_broken_connection_and_half_a_file(publisher, home, fault, says, times):
    publisher.files["/tweets/Tweets.csv"] = TWEETS
    publisher.faults = [fault] * times if times > 2 else [*[fault] * times, ""]
    done = perfed("data", "get", "tweets", "--mirror", publisher.url)
    if times > 2:
        refused(done, publisher.url, *says)
        assert left(home) == [] and len(publisher.asked) == 3
    else:
        assert done.code == 0, done.err
        assert (home / ".cache/perfed/originals/tweets/Tweets.csv").read_bytes() == TWEETS


def test_another_file_than_was_published(publisher, home):
    publisher.files["/adult/adult.zip"] = b"not this"
    done = perfed("data", "get", "adult", "--mirror", publisher.url)
    refused(done, "adult.zip did not come", "another checksum than sha256:7537312dd56c2b980")
    assert left(home) == []


def test_no_such_file_and_nobody_there(publisher, home):
    refused(perfed("data", "get", "adult", "--mirror", publisher.url + "/"), "the server says 404")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        refused(perfed("data", "get", "adult", "--mirror", url), "adult.zip did not come", "refused")
    refused(perfed("data", "get", "adult", "--mirror", "nonsense"), "adult.zip did not come")
    assert left(home) == []


def test_no_space_for_the_original_or_the_result(publisher, home):
    rows = [f"{i},negative,1.0,Delta,user{i},{np.random.default_rng(i).bytes(60).hex()}".encode() for i in range(2000)]
    publisher.files["/tweets/Tweets.csv"] = b"\n".join([TWEETS.partition(b"\n")[0], *rows])
    with full_after(8):
        refused(perfed("data", "get", "tweets", "--mirror", publisher.url), "originals", "File too large")
    assert left(home) == [] and len(publisher.asked) <= 3
    assert perfed("data", "get", "tweets", "--mirror", publisher.url).code == 0
    (home / ".cache/perfed/airline_tweets.npz").unlink()
    before = left(home)
    with full_after(8):
        refused(perfed("data", "get", "tweets"), "airline_tweets.npz", "File too large")
    assert left(home) == before


def test_the_second_address_where_the_first_is_gone(publisher, home, monkeypatch):
    publisher.files["/good.csv"] = TWEETS
    original = Original("Tweets.csv", (f"{publisher.url}/gone.csv", f"{publisher.url}/good.csv"))
    monkeypatch.setitem(
        SOURCES, "tweets", Source("t.npz", "", originals=(original,), converter="tables.read_airline_tweets")
    )
    assert perfed("data", "get", "tweets").code == 0 and set(publisher.asked) == {"/gone.csv", "/good.csv"}


def test_originals_at_hand(publisher, home, tmp_path):
    tweets = tmp_path / "downloads" / "Tweets.csv"
    tweets.parent.mkdir()
    tweets.write_bytes(TWEETS)
    for given in (tweets, tweets.parent):
        done = perfed("data", "get", "tweets", "--from", given, "--data-dir", tmp_path / "new" / "folder", "--again")
        assert done.code == 0, done.err
        assert (tmp_path / "new" / "folder" / "airline_tweets.npz").is_file() and left(home) == []
    tweets.write_bytes(b"\0\xff broken")
    refused(perfed("data", "get", "tweets", "--from", tweets), "tweets: the originals cannot be read")
    refused(perfed("data", "get", "adult", "--from", tmp_path / "absent"), "no such file")
    other = tmp_path / "other.csv"
    other.write_bytes(TWEETS)
    assert perfed("data", "get", "tweets", "--from", other, "--data-dir", tmp_path / "other").code == 0
    refused(perfed("data", "get", "adult", "--from", other), "none of the originals: adult.zip, adult.data, adult.test")
    assert left(home) == [] and not publisher.asked


def test_uci_s_four_files_or_its_archive_give_the_file_that_ships(home, tmp_path):
    with np.load(perfed("data", "where", "heart-disease").out.split(": ")[1].strip()) as file:
        held = dict(file)
    for number, name in enumerate(held["hospital_names"].tolist()):
        rows = [
            ",".join("?" if np.isnan(v) else f"{float(str(v))}" for v in row) + f",{y}\n"
            for row, y, of in zip(held["x"], held["y_severity"], held["hospital"], strict=True)
            if of == number
        ]
        (tmp_path / f"processed.{name}.data").write_text("".join(rows))
    given = [part for file in tmp_path.glob("*.data") for part in ("--from", file)]
    done = perfed("data", "get", "heart-disease", "--again", *given)
    assert done.code == 0 and "the arrays that perfed's results were measured on" in done.out, done.err


def test_names_of_data_sets_and_experiments(home):
    refused(perfed("data", "get", "mnst"), "no data are called 'mnst' (did you mean 'mnist'?)")
    refused(perfed("data", "get", "digits"), "'digits' needs no file")
    refused(perfed("data", "get", "street-digits"), "no command makes it")
    refused(perfed("data", "get", "cifar100"), "huggingface")
    refused(perfed("data", "where", "flic-mnist-usps"), "'mnist.npz' was not found", "perfed data get mnist")
    out = perfed("data", "where", "flamby-heart").out
    assert out.startswith("heart-disease: ") and "shipped" in out


def test_the_missing_file_s_message_ends_with_the_command(home):
    done = perfed("run", "flic-mnist-usps", "--out", "out")
    refused(done, "file 'mnist.npz' was not found")
    assert done.err.endswith("perfed data get mnist\n")


def test_everything_has_an_address_a_licence_and_a_word_on_checksums():
    listed = json.loads(perfed("data", "list", "--json").out)
    assert list(listed) == list(SOURCES)
    for name, facts in listed.items():
        assert bool(facts["why_not"]) != bool(SOURCES[name].converter), name
        assert facts["why_not"] or facts["licence"]
        for original in facts["originals"]:
            assert all(url.startswith(("https://", "http://")) for url in original["urls"]) and original["urls"]
            kind, _, digits = original["checksum"].partition(":")
            assert len(digits) == {"": 0, "md5": 32, "sha256": 64}[kind]
    text = perfed("data", "list").out
    assert "checksum unknown" in text and "not by command" in text and "CC BY 4.0" in text


def test_every_file_that_a_data_set_reads_is_listed():
    datasets = json.loads(perfed("list", "datasets", "--json").out)
    files = {file for item in datasets for file in item["files"]}
    assert files <= {source.file for source in SOURCES.values()}


def test_recordings_come_through_moabb(monkeypatch, home):
    came: list[str] = []
    sets = ModuleType("moabb.datasets")
    for name in ("AlexMI", "BNCI2014_001", "BNCI2014_002", "BNCI2014_004", "Weibo2014", "Zhou2016"):
        setattr(sets, name, lambda name=name: SimpleNamespace(download=lambda: came.append(name)))
    refused(perfed("data", "get", "bci-iv-2a"), "[bci]")
    monkeypatch.setitem(sys.modules, "moabb", ModuleType("moabb"))
    monkeypatch.setitem(sys.modules, "moabb.datasets", sets)
    assert perfed("data", "get", "bci-iv-2a").code == 0 and came == ["BNCI2014_001"]
    assert perfed("data", "get", "bci-moabb").code == 0 and len(came) == 7
    assert left(home) == []
