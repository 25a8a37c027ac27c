"""No wait without an end, whatever the sites and the server do."""

from __future__ import annotations

import re
import time

import pytest
from memory_post import MemoryQueue

from perfed.errors import PerfedError
from perfed.sites.flower import transport as module
from perfed.sites.flower.transport import Connection, QueueTransport

NAMES = ["north", "south", "west"]
ALL = {name: name.encode() for name in NAMES}


@pytest.fixture
def message_queue():
    return MemoryQueue(dict.fromkeys(NAMES, bytes.upper))


@pytest.fixture
def transport(message_queue, monkeypatch):
    monkeypatch.setattr(module, "POLL_SECONDS", 0.005)
    monkeypatch.setattr(module, "REFRESH_SECONDS", 0.02)
    transport = QueueTransport(message_queue)
    yield transport
    message_queue.hang.clear()
    transport.close()


def errors(answers):
    """By site; how many seconds it took depends on the machine."""
    return {a.site: re.sub(r"\d\.\d", "N", a.error) for a in answers if a.body is None}


def test_an_exchange_gives_every_reply_as_it_comes(message_queue, transport):
    message_queue.delay = {"north": 0.3, "south": 0.1}
    assert transport.list_sites() == NAMES
    answers = list(transport.exchange(ALL, 5))
    assert [answer.site for answer in answers] == ["west", "south", "north"]
    assert all(answer.body == answer.site.upper().encode() and not answer.error for answer in answers)
    assert 0.3 <= answers[-1].seconds < 1


def test_who_is_missing_at_the_deadline_is_named_with_why(message_queue, transport):
    message_queue.drop, message_queue.away, message_queue.fail = {"north"}, {"south"}, {"west": "no memory"}
    began = time.monotonic()
    answers = list(transport.exchange(ALL, 0.5))
    assert 0.5 <= time.monotonic() - began < 0.8
    assert errors(answers) == {
        "west": "site 'west': no memory",
        "north": "site 'north': no answer within N seconds",
        "south": "site 'south': not connected within N seconds",
    }


@pytest.mark.long
def test_with_enough_answers_who_is_not_connected_is_not_waited_for(message_queue, transport):
    """A site that is connected is, and with too few answers everybody."""
    message_queue.away, message_queue.delay = {"south"}, {"west": 0.3}
    answers = list(transport.exchange(ALL, 10, 2))
    assert [answer.site for answer in answers] == ["north", "west", "south"] and answers[-1].seconds < 2
    assert errors(answers) == {"south": "site 'south': not connected within N seconds"}
    for least in (0, 3):
        assert list(transport.exchange(ALL, 0.6, least))[-1].seconds >= 0.6


@pytest.mark.long
def test_who_is_waited_for_is_said_before_the_deadline(message_queue, transport, monkeypatch):
    monkeypatch.setattr(module, "REMINDER_SECONDS", 0.1)
    notes = []
    transport.note = notes.append
    message_queue.drop, message_queue.away = {"north"}, {"south"}
    answers = list(transport.exchange(ALL, 0.8))
    assert [answer.site for answer in answers] == ["west", "north", "south"]
    reasons = "site 'north': no answer within N seconds, site 'south': not connected within N seconds"
    assert [re.sub(r"\d\.\d", "N", note) for note in notes] == [f"still waiting: {reasons}"] * 3  # at 0.1, 0.3, 0.7 s
    message_queue.drop, message_queue.away = set(), set()
    assert not errors(transport.exchange({"south": b"s"}, 5)) and len(notes) == 3


def test_a_site_that_connects_before_the_deadline_gets_its_message(message_queue, transport):
    message_queue.away = {"south"}
    answers = transport.exchange(ALL, 5)
    first = [next(answers), next(answers)]
    message_queue.away = set()
    assert next(answers).body == b"SOUTH"
    assert {answer.site for answer in first} == {"north", "west"}


@pytest.mark.long
def test_a_straggler_gets_its_next_message_after_its_late_reply_which_is_dropped(message_queue, transport):
    message_queue.delay = {"west": 0.6}
    answers = transport.exchange(ALL, 5)
    first = [next(answers).site, next(answers).site]
    answers.close()
    assert sorted(first) == ["north", "south"]
    assert errors(transport.exchange({"west": b"second"}, 0.2)) == {
        "west": "site 'west': still busy with an earlier message after N seconds"
    }
    (answer,) = transport.exchange({"west": b"third"}, 5)
    assert answer.body == b"THIRD"
    assert message_queue.got["west"] == [b"west", b"third"]  # what was not sent in time is never sent


@pytest.mark.long
def test_a_server_that_hangs_is_named_at_the_deadline(message_queue, transport, monkeypatch):
    monkeypatch.setattr(module, "HANG_SECONDS", 0.2)
    assert transport.list_sites() == NAMES
    message_queue.hang.set()
    began = time.monotonic()
    found = errors(transport.exchange(ALL, 0.6))
    assert time.monotonic() - began < 0.9
    assert found == {name: f"site '{name}': the server has not answered for N seconds" for name in NAMES}
    message_queue.hang.clear()
    assert not errors(transport.exchange(ALL, 5))


def test_what_was_on_its_way_is_sent_once_more_after_the_server_was_away(message_queue, transport, monkeypatch):
    monkeypatch.setattr(module, "HANG_SECONDS", 0.2)
    message_queue.drop = {"west"}  # as if the server had been killed while it handed the message over
    answers = transport.exchange(ALL, 5)
    first = [next(answers), next(answers)]
    message_queue.hang.set()
    time.sleep(0.4)
    message_queue.drop = set()
    message_queue.hang.clear()
    (last,) = answers
    assert last.body == b"WEST" and {answer.site for answer in first} == {"north", "south"}
    assert [len(message_queue.got[name]) for name in NAMES] == [1, 1, 2]


def test_a_site_that_is_silent_and_connected_is_asked_again(message_queue, transport, monkeypatch):
    """Its message or its reply was lost by a server that was killed."""
    monkeypatch.setattr(module, "RESEND_SECONDS", 0.2)
    message_queue.drop = {"west"}
    answers = transport.exchange({"west": b"lost"}, 10)
    while not message_queue.got["west"]:
        time.sleep(0.01)
    message_queue.drop = set()
    (answer,) = answers
    assert answer.body == b"LOST" and message_queue.got["west"] == [b"lost", b"lost"]
    assert not errors(transport.exchange(ALL, 5))  # and what was lost keeps nobody busy


@pytest.mark.long
def test_a_message_that_is_lost_again_and_again_is_sent_until_the_deadline(message_queue, transport, monkeypatch):
    monkeypatch.setattr(module, "RESEND_SECONDS", 0.1)
    message_queue.drop = {"west"}
    answers = transport.exchange({"west": b"lost"}, 10)
    while len(message_queue.got["west"]) < 3:
        time.sleep(0.01)
    message_queue.drop = set()
    (answer,) = answers
    times = len(message_queue.got["west"])
    assert answer.body == b"LOST" and times in (3, 4)  # the third may have come when nothing was lost any more
    assert sum(0.1 * 2**wait for wait in range(times - 1)) <= answer.seconds < 5  # each is twice the one before


@pytest.mark.long
def test_a_slow_site_is_asked_again_ever_more_seldom_and_answers_once(message_queue, transport, monkeypatch):
    """With what it has kept, where it is a site; its next message waits until it has."""
    monkeypatch.setattr(module, "RESEND_SECONDS", 0.2)
    message_queue.delay = {"west": 0.5}
    (answer,) = transport.exchange({"west": b"slow"}, 10)
    assert answer.body == b"SLOW"
    monkeypatch.setattr(module, "RESEND_SECONDS", 10)
    (answer,) = transport.exchange({"west": b"next"}, 10)
    assert answer.body == b"NEXT" and message_queue.got["west"] == [b"slow", b"slow", b"next"]


@pytest.mark.long
def test_a_copy_that_is_lost_keeps_no_site_busy(message_queue, transport, monkeypatch):
    monkeypatch.setattr(module, "RESEND_SECONDS", 0.25)
    message_queue.delay = {"west": 0.4}
    answers = transport.exchange({"west": b"slow"}, 10)
    while not message_queue.got["west"]:
        time.sleep(0.001)
    lost = []
    monkeypatch.setattr(message_queue, "send", lambda *message: lost.append(message) or "nowhere")
    assert [answer.body for answer in answers] == [b"SLOW"]
    monkeypatch.undo()
    (answer,) = transport.exchange({"west": b"next"}, 2)
    assert answer.body == b"NEXT" and len(lost) == 1


def test_a_server_that_never_answered_ends_the_question_for_sites(message_queue, transport, monkeypatch):
    monkeypatch.setattr(module, "HANG_SECONDS", 0.1)
    message_queue.hang.set()
    with pytest.raises(PerfedError, match="the server has not answered"):
        transport.list_sites()
    assert transport.wait_for(NAMES, 0.1) == NAMES


def test_waiting_for_sites_says_who_is_missing(message_queue, transport):
    message_queue.away = {"south", "north"}
    began = time.monotonic()
    assert transport.wait_for(NAMES, 0.3) == ["north", "south"]
    assert time.monotonic() - began < 0.6
    message_queue.away = set()
    assert transport.wait_for(NAMES, 5) == []


def test_a_site_that_was_started_again_is_asked_again_under_its_new_number(message_queue, transport):
    message_queue.drop = {"west"}
    answers = transport.exchange({"west": b"lost"}, 10)
    while not message_queue.got["west"]:
        time.sleep(0.01)
    message_queue.drop = set()
    message_queue.numbers["west"] = 77
    (answer,) = answers
    assert answer.body == b"LOST" and message_queue.got["west"] == [b"lost", b"lost"]


@pytest.mark.long
def test_a_site_that_is_gone_is_asked_again_until_the_deadline_and_named_then(message_queue, transport):
    message_queue.gone = {"west", "south"}
    answers = transport.exchange({"west": b"here?", "south": b"here?"}, 4)
    while not (message_queue.got["west"] and message_queue.got["south"]):
        time.sleep(0.01)
    message_queue.gone = {"west"}
    back, lost = answers
    assert (back.site, back.body) == ("south", b"HERE?") and back.seconds < 4
    assert lost.error.startswith("site 'west': it is gone, and has not answered within 4.")


def test_of_two_connections_of_one_site_the_later_counts(message_queue, transport):
    message_queue.extra = [Connection(77, "west", "here", "2")]
    assert transport.list_sites() == NAMES
    (answer,) = transport.exchange({"west": b"again"}, 5)
    assert answer.body == b"AGAIN"


@pytest.mark.parametrize("location", ["elsewhere", ""])
def test_two_sites_with_one_name_are_refused(message_queue, transport, location):
    message_queue.extra = [Connection(77, "west", location, "2")]
    with pytest.raises(PerfedError, match="two sites are called 'west'; every site needs a name of its own"):
        transport.list_sites()


def test_what_breaks_the_queue_is_raised_where_answers_are_awaited(message_queue, transport, monkeypatch):
    assert transport.list_sites() == NAMES

    def broken(message_ids):
        raise RuntimeError("the run was stopped")

    monkeypatch.setattr(message_queue, "collect_replies", broken)
    with pytest.raises(RuntimeError, match="the run was stopped"):
        list(transport.exchange(ALL, 5))
