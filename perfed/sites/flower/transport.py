"""Bytes out to sites by name and bytes back, with no wait without an end: what the server needs of a network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from perfed.errors import PerfedError, shorten_list


@dataclass(frozen=True)
class Answer:
    """What came back from one site.

    Attributes:
        site: its name.
        body: the reply's bytes; ``None`` where there is none.
        error: one line that names the site and says why there is no reply; empty where there is one.
        seconds: from the beginning of the exchange to this answer.
    """

    site: str
    body: bytes | None
    error: str
    seconds: float


class Transport(Protocol):
    """A network of sites. One exchange at a time, from one thread.

    Attributes:
        note: gets a line, now and then, while nothing comes: which sites are waited for, and why as far as it is known.
    """

    note: Callable[[str], None]

    def sites(self) -> list[str]:
        """Names of the sites that are connected now, sorted.

        Raises:
            PerfedError: two sites have one name, or the server does not answer.
        """

    def wait_for(self, names: list[str], seconds: float) -> list[str]:
        """Wait until all ``names`` are connected, at most ``seconds``.

        Returns:
            those that are still missing, sorted.

        Raises:
            PerfedError: two sites have one name.
        """

    def exchange(self, messages: Mapping[str, bytes], deadline: float, least: int = 0) -> Iterator[Answer]:
        """Send each site its message and give the answers as they come, one for each message.

        A site that is not connected, has gone, or is busy with an earlier message gets it as soon as it can. At the
        deadline every site that is missing gives an answer with an error. Closing the iterator early leaves the others
        busy: their late replies are dropped, and only then they get a next message. After the server was away, what was
        on its way is sent once more: a site has to answer a message that it has answered before as it did then.

        Args:
            messages: bytes by name of the site.
            deadline: seconds from now until which answers count.
            least: answers after which sites that are not connected are no longer waited for; 0: all are.

        Raises:
            PerfedError: two sites have one name.
        """


@dataclass(frozen=True)
class Connection:
    """One connection of a site.

    Attributes:
        number: the office's own number of it; a site that is started again may get another one.
        site: the name of the site.
        place: machine and folder, as far as known: two connections of one name and place are one site started again.
        since: when it was activated, as a text that sorts.
    """

    number: int
    site: str
    place: str = ""
    since: str = ""


@dataclass(frozen=True)
class ReceivedMessage:
    """A reply or an error for the letter with this number.

    Attributes:
        letter: its number.
        body: of the reply; ``None``: an error.
        error: what has happened.
        again: whether the site can answer where it is asked once more, such as when it has been started again.
    """

    letter: str
    body: bytes | None
    error: str = ""
    again: bool = False


class MessageQueue(Protocol):
    """What delivers letters; :class:`~perfed.sites.flower.transport.QueueTransport` calls it from one thread only."""

    def connections(self) -> Sequence[Connection]:
        """All connections that are alive."""

    def send(self, node: int, body: bytes, seconds: float) -> str:
        """Post a letter that expires after ``seconds``; its number."""

    def collect_replies(self, message_ids: Sequence[str]) -> Sequence[ReceivedMessage]:
        """What has come for these letters since the last call; does not wait for more."""


POLL_SECONDS, POLL_SHARE = 0.1, 0.04
"""Seconds between two looks for replies; more in a long exchange: this share of its time so far, up to ``REFRESH_SECONDS``."""
REFRESH_SECONDS = 1.0
"""Seconds between two looks for sites."""
EXTRA_LIFETIME = 60.0
"""Seconds that a message lives beyond its deadline: late replies are taken away, and clocks may differ by so much."""
RESEND_SECONDS = 60.0
"""Seconds after which a connected site that has not answered is asked again; once more after twice as long, and so on:
a server that was killed may have lost its message or its reply. A site that has answered already, or does so
meanwhile, has kept its answer."""
REMINDER_SECONDS = 30.0
"""Seconds without an answer after which it is said who is waited for; again after twice as long, and so on."""
HANG_SECONDS, HANG_BYTES_PER_SECOND = 3.0, 1e6
"""A call of the office that takes so many seconds, and carries fewer bytes a second, hangs: the server is away."""


@dataclass(eq=False)
class _Letter:
    site: str
    body: bytes
    exchange: int
    ends: float  # by the monotonic clock
    node: int = 0
    sent: float = 0.0  # when it was posted last
    times: int = 0  # how often it was posted
    answered: bool = False  # a copy of it may be on its way still
    after: float = float("-inf")  # not to be posted before
    why: str = ""  # what became of it the last time


class QueueTransport:
    """A :class:`~perfed.sites.flower.transport.Transport` over an :class:`MessageQueue`.

    Args:
        office: what delivers letters.

    Attributes:
        note: gets a line, now and then, while no answer comes.
    """

    def __init__(self, office: MessageQueue) -> None:
        self.note: Callable[[str], None] = lambda line: None
        self._office = office
        self._changed = threading.Condition()  # guards what follows; the thread changes it, the caller waits for it
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._refreshed = float("-inf")
        self._looked = float("-inf")
        self._nodes: dict[str, Connection] = {}
        self._twice = ""
        self._waiting: dict[str, _Letter] = {}  # by site: not yet posted
        self._posted: dict[str, _Letter] = {}  # by number: not yet answered
        self._answers: list[Answer] = []
        self._exchange = 0
        self._began = 0.0
        self._calling_since: float | None = None
        self._broken: BaseException | None = None

    def sites(self) -> list[str]:
        """Names of the sites that are connected now, sorted."""
        with self._until(lambda: self._refreshed > 0, 2 * HANG_SECONDS):
            if self._refreshed < 0:
                raise PerfedError(f"the server has not answered for {2 * HANG_SECONDS:.1f} seconds")
            return sorted(self._nodes)

    def wait_for(self, names: list[str], seconds: float) -> list[str]:
        """Wait until all ``names`` are connected, at most ``seconds``; those that are still missing, sorted."""
        with self._until(lambda: set(names) <= set(self._nodes), seconds):
            return sorted(set(names) - set(self._nodes))

    def exchange(self, messages: Mapping[str, bytes], deadline: float, least: int = 0) -> Iterator[Answer]:
        """Send each site its message and give the answers as they come, one for each message."""
        with self._until(lambda: True, 0):
            self._exchange += 1
            self._began = time.monotonic()
            self._answers = []
            ends = self._began + deadline
            letters = [_Letter(site, body, self._exchange, ends) for site, body in sorted(messages.items())]
            self._waiting = {letter.site: letter for letter in letters}
            return self._receive(self._exchange, set(messages), ends, len(messages) - least if least else -1)

    def close(self) -> None:
        """Let the thread end; what is still on its way is dropped."""
        self._closed.set()

    @contextmanager
    def _until(self, condition: Callable[[], bool], seconds: float) -> Iterator[None]:
        """Hold the lock, after ``condition`` or ``seconds``; raises what keeps the post from working."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._carry, name="perfed-post", daemon=True)
            self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: bool(self._broken or self._twice) or condition(), max(seconds, 0))
            if self._broken is not None:
                raise self._broken
            if self._twice:
                raise PerfedError(self._twice)
            yield

    def _receive(self, exchange: int, missing: set[str], ends: float, spared: int) -> Iterator[Answer]:
        """``spared``: so many sites, and fewer, are not waited for while they are not connected."""

        def alone() -> bool:
            return len(missing) <= spared and not missing & self._nodes.keys()

        silence = REMINDER_SECONDS
        speaks = time.monotonic() + silence
        try:
            while missing:
                with self._until(lambda: bool(self._answers) or alone(), min(speaks, ends) - time.monotonic()):
                    if self._exchange != exchange:
                        raise RuntimeError("the next exchange has begun")
                    came, self._answers = self._answers, []
                    late = [] if came else [self._too_late(site) for site in sorted(missing)]
                    waits = not alone()
                if late and waits and time.monotonic() < ends:
                    self.note(f"still waiting: {shorten_list([answer.error for answer in late], 3)}")
                    silence, speaks = 2 * silence, time.monotonic() + 2 * silence
                    continue
                missing -= {answer.site for answer in came or late}
                yield from came or late
        finally:
            with self._changed:
                if self._exchange == exchange:
                    self._waiting = {}
                    self._exchange += 1  # nothing of it is open any more

    def _too_late(self, site: str) -> Answer:
        now = time.monotonic()
        seconds = now - self._began
        sent = [letter for letter in self._posted.values() if letter.site == site and self._is_open(letter)]
        waits = [self._waiting[site]] if site in self._waiting else []
        reasons = [letter.why for letter in (*waits, *sent) if letter.why]
        if reasons:
            why = f"{reasons[0]}, and has not answered within {seconds:.1f} seconds"
        elif self._calling_since is not None and now - self._calling_since > HANG_SECONDS:
            why = f"the server has not answered for {now - self._calling_since:.1f} seconds"
        elif sent:
            why = f"no answer within {seconds:.1f} seconds"
        elif self._busy(site):
            why = f"still busy with an earlier message after {seconds:.1f} seconds"
        elif site in self._nodes:
            why = f"its message could not be sent within {seconds:.1f} seconds"
        else:
            why = f"not connected within {seconds:.1f} seconds"
        return Answer(site, None, f"site '{site}': {why}", seconds)

    def _busy(self, site: str, but: _Letter | None = None) -> bool:
        """With another letter than ``but``; a copy of one that it has answered may be lost, and takes no time."""
        out = self._posted.values()
        return any(letter.site == site and letter is not but and not letter.answered for letter in out)

    def _is_open(self, letter: _Letter) -> bool:
        return letter.exchange == self._exchange and not letter.answered

    def _carry(self) -> None:
        """The thread: look for sites, post what waits, collect what came."""
        try:
            while not self._closed.wait(POLL_SECONDS):
                if time.monotonic() - self._refreshed > REFRESH_SECONDS:
                    self._refresh()
                self._post()
                self._collect()
        except BaseException as error:
            with self._changed:
                self._broken = error
                self._changed.notify_all()

    @contextmanager
    def _calling(self, size: int = 0) -> Iterator[list[int]]:
        """Around a call of the office that carries ``size`` bytes, and those that are added to the list."""
        carried = [size]
        began = self._calling_since = time.monotonic()
        yield carried
        self._calling_since = None
        seconds = time.monotonic() - began
        if seconds > HANG_SECONDS and sum(carried) < HANG_BYTES_PER_SECOND * seconds:
            self._send_again()

    def _send_again(self) -> None:
        """A server that is killed while it hands a message over forgets that it did not."""
        with self._changed:
            for number, letter in list(self._posted.items()):
                if self._is_open(letter):
                    del self._posted[number]
                    self._waiting[letter.site] = letter

    def _refresh(self) -> None:
        with self._calling():
            nodes = self._office.nodes()
        with self._changed:
            self._refreshed = time.monotonic()
            self._twice = ""
            found: dict[str, Connection] = {}
            for node in sorted(nodes, key=lambda node: node.since):
                other = found.get(node.site)
                if other is not None and (other.place != node.place or not node.place):
                    self._twice = f"two sites are called '{node.site}'; every site needs a name of its own"
                found[node.site] = node
            self._nodes = found
            now = time.monotonic()
            for number, letter in list(self._posted.items()):
                now_at = found.get(letter.site)
                silent = now - letter.sent > RESEND_SECONDS * 2 ** (letter.times - 1) and self._is_open(letter)
                if now_at is not None and now_at.number != letter.node:
                    self._arrived(
                        ReceivedMessage(number, None, "it was started again before it answered", may_retry=True)
                    )
                elif now_at is not None and silent:
                    self._waiting[letter.site] = letter
            self._changed.notify_all()

    def _post(self) -> None:
        with self._changed:
            now = time.monotonic()
            ready = [
                (letter, self._nodes[site].number)
                for site, letter in self._waiting.items()
                if site in self._nodes and not self._busy(site, letter) and letter.after < now < letter.ends
            ]
        for letter, node in ready:
            letter.node = node
            with self._calling(len(letter.body)):
                number = self._office.send(node, letter.body, max(letter.ends - time.monotonic(), 0) + EXTRA_LIFETIME)
            with self._changed:
                self._posted[number] = letter
                letter.sent = time.monotonic()
                letter.times += 1
                if self._waiting.get(letter.site) is letter:
                    del self._waiting[letter.site]

    def _collect(self) -> None:
        with self._changed:
            numbers = list(self._posted)
            now = time.monotonic()
            pause = min(POLL_SHARE * (now - self._began), REFRESH_SECONDS)  # each look costs the server 10 ms
        if not numbers or now - self._looked < pause:
            return
        with self._calling() as carried:
            came = self._office.collect(numbers)
            carried += [len(delivery.body or b"") for delivery in came]
            with self._changed:
                self._looked = time.monotonic()
                for delivery in came:
                    self._arrived(delivery)
                self._changed.notify_all()

    def _arrived(self, delivery: ReceivedMessage) -> None:
        """An answer counts if its exchange is the one that is running; what was posted to its site before it is done,
        or lost, for a site takes one letter after the other.

        A site that has gone, and may come back in time, is asked once more then.
        """
        letter = self._posted.get(delivery.letter)
        if letter is None:
            return
        of_site = [number for number, other in self._posted.items() if other.site == letter.site]
        done = of_site[: of_site.index(delivery.letter) + 1]
        for number in done[-1:] if delivery.again else done:
            del self._posted[number]
        if not self._is_open(letter) or (delivery.again and letter in self._posted.values()):
            return
        if delivery.again:
            letter.why, letter.after = delivery.error, time.monotonic() + REFRESH_SECONDS
            self._waiting[letter.site] = letter
            return
        letter.answered = True
        self._waiting.pop(letter.site, None)
        error = f"site '{letter.site}': {delivery.error}" if delivery.body is None else ""
        self._answers.append(Answer(letter.site, delivery.body, error, time.monotonic() - self._began))
