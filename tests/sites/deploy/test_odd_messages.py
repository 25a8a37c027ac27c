"""Whatever a server sends: each message has a reply, each has its lines in the log, and none says more than it may."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from stations import COLUMNS, Stations, answer_all, study

from perfed.errors import PerfedError
from perfed.experiment.config import read as read_study
from perfed.sites.deploy.opening import Opening
from perfed.sites.deploy.site_agent import SiteAgent
from perfed.sites.flower.hash_chain import LOG, read_log, verify_log
from perfed.sites.flower.message import pack, unpack
from perfed.sites.flower.refusal import RefusalReason
from perfed.sites.flower.site import Site
from perfed.sites.flower.transport import Answer

VALUES: list[Any] = [None, True, -1, 0, 10**30, 1.5, "", "x" * 500, [], [[1]], {}, {"a": None}, "../../x", "train"]


class Recorded(Stations):
    """Keeps what south was sent."""

    def exchange(self, messages, deadline, least=0):
        self.__dict__.setdefault("sent", []).append(messages["south"])
        return super().exchange(messages, deadline)


@pytest.fixture
def sent(tables) -> list[bytes]:
    """What a server sends in a whole run."""
    with closing(Recorded(tables)) as stations:
        answer_all(tables, study(tables), stations)
        found: list[bytes] = stations.__dict__["sent"]
    return found


def odd_messages(sent: list[bytes], count: int) -> Iterator[bytes]:
    """Proper messages of which something was changed, and bytes that are none."""
    generator = random.Random(0)
    for number in range(count):
        header, tree = unpack(generator.choice(sent))
        for _ in range(generator.randint(1, 3)):
            name = generator.choice([*header, "unheard-of"])
            target = header
            if isinstance(header.get(name), dict) and generator.random() < 0.7:
                target, name = header[name], generator.choice([*header[name], "unheard-of"])
            target[name] = generator.choice(VALUES)
            if generator.random() < 0.2:
                target.pop(name)
        if number % 5 == 0:
            tree = {"shared": torch.zeros(3), "more": {"a": torch.full((2,), torch.nan)}}
        message = pack(header, tree)
        yield message[: generator.randint(0, len(message))] if number % 7 == 0 else message


def secrets(path: Path) -> list[bytes]:
    """What no reply may hold: numbers of the table, and where it lies."""
    table = pd.read_csv(path / "south.csv").select_dtypes("number")
    cells = {str(value) for value in table.to_numpy().ravel() if len(str(value)) > 4}
    assert len(cells) > 10
    return [text.encode() for text in (*cells, str(path), "south.csv")]


@pytest.mark.long
def test_every_odd_message_has_a_reply_and_its_lines_and_says_nothing_of_the_table(tables, sent):
    notes: list[str] = []
    kinds, said = set[str](), set[str]()
    forbidden, log = secrets(tables), tables / "odd" / LOG
    with closing(SiteAgent(tables / "odd", "south", tables / "south.csv", study(tables), notes.append)) as station:
        before = len(read_log(log))
        for number, message in enumerate(odd_messages(sent, 200)):
            reply = station.answer(message)
            header, _ = unpack(reply)
            assert header["kind"] in ("told", "facts", "done", "error")
            busy = "busy" in header
            kinds.add(header["kind"])
            said.add(header.get("error", ""))
            assert header["kind"] != "error" or busy or header["error"] in set(RefusalReason), header["error"]
            text = reply.replace(str(tables / "run").encode(), b"") if busy else reply  # the server's own directory
            assert not [secret for secret in forbidden if secret in text]
            arrived, left = read_log(log)[before + 2 * number :]
            assert arrived["arrived"] and arrived["bytes"] == len(message) and left["bytes"] == len(reply)
    assert verify_log(log) is None and len(notes) > 50
    ends = [line["note"] for line in read_log(log) if "note" in line]
    assert (
        ends[0].startswith("site 'south' has started for a study with SHA-256") and ends[-1] == "the site has stopped"
    )


@pytest.mark.long
def test_forged_classes_are_no_oracle(tables, sent):
    """Rows whose class an agreement lacks are neither counted nor named."""
    header, _ = unpack(sent[1])
    assert header["kind"] == "agreement"
    notes: list[str] = []
    forged = {**header, "agreement": {**header["agreement"], "classes": ["dead", "well"]}}
    with closing(SiteAgent(tables / "odd", "south", tables / "south.csv", None, notes.append)) as station:
        reply = unpack(station.answer(pack(forged, {})))[0]
    assert reply["error"] == str(RefusalReason.DATA) and "ill" in notes[-1]


@pytest.mark.long
@pytest.mark.parametrize(
    "error", [TypeError, KeyError, RuntimeError, MemoryError, RecursionError, OSError, PerfedError]
)
def test_whatever_fails_the_server_is_told_a_fixed_sentence(error, tables, sent, monkeypatch):
    def failing(*_: object) -> bytes:
        raise error("row 3 is 61.25")

    monkeypatch.setattr(Site, "answer", failing)
    notes: list[str] = []
    with closing(SiteAgent(tables / "at-south", "south", tables / "south.csv", None, notes.append)) as station:
        reply = unpack(station.answer(sent[-1]))[0]
        assert reply["error"] in set(RefusalReason) and "row 3 is 61.25" in notes[-1]
        assert [("arrived" in line, "header" in line) for line in read_log(tables / "at-south" / LOG)[-2:]] == [
            (True, False),
            (False, True),
        ]


@pytest.mark.long
def test_what_cannot_be_logged_does_not_leave(tables, sent, monkeypatch):
    with closing(SiteAgent(tables / "at-south", "south", tables / "south.csv")) as station:
        monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(PerfedError) as said:
            station.answer(sent[0])
        assert str(said.value) == str(RefusalReason.DISK)
        monkeypatch.undo()


@pytest.mark.long
def test_whatever_a_site_tells_the_server_begins_or_names_the_site(tables):
    """What west tells, and its facts, with something changed, or bytes that are none."""
    text, proper = study(tables), dict[tuple[str, str], bytes]()
    kinds = {"study": "told", "agreement": "facts"}

    def begun(transport: Any) -> None:
        opening = Opening(transport, list(COLUMNS), read_study(text, "the study"), text, "run", tables / "run", 60.0)
        (tables / "agreed.json").unlink(missing_ok=True)
        opening.collect_clients(tables / "agreed.json")

    with closing(Stations(tables)) as stations:
        begun(stations)
        for site, left in stations.left.items():
            proper |= {(unpack(reply)[0]["kind"], site): reply for reply in left}

    class Replayed:
        def __init__(self, kind: str, odd: bytes) -> None:
            self.replies = {**proper, (kind, "west"): odd}

        def exchange(self, messages: Mapping[str, bytes], deadline: float, least: int = 0) -> Iterator[Answer]:
            for site, message in messages.items():
                yield Answer(site, self.replies[kinds[unpack(message)[0]["kind"]], site], "", 1.0)

    ended = {True: 0, False: 0}
    for kind in kinds.values():
        for odd in odd_messages([proper[kind, "west"]], 100):
            try:
                begun(Replayed(kind, odd))
                ended[True] += 1
            except PerfedError as error:
                assert "'west'" in str(error) and "\n" not in str(error), error
                ended[False] += 1
    assert ended[True] > 10 and ended[False] > 50
