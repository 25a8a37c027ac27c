"""The transport of messages between the server and the sites: it addresses sites by name and always ends a wait.

:class:`Transport` is what the server needs of a network. :class:`QueueTransport` implements it over a
:class:`MessageQueue`, which may lose messages, hang or be restarted.
"""

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
    """The outcome of one message to one site: a reply or an error.

    Attributes:
        site: The name of the site.
        body: The bytes of the reply; ``None`` if there is no reply.
        error: One line that names the site and the reason why there is no reply; empty if there is one.
        seconds: The time from the beginning of the exchange to this answer.
    """

    site: str
    body: bytes | None
    error: str
    seconds: float


class Transport(Protocol):
    """A network of sites, which is used from one thread and runs one exchange at a time.

    Attributes:
        note: A function that is called with a line from time to time while no answer arrives. The line names the sites
            that the transport is waiting for and, where they are known, the reasons.
    """

    note: Callable[[str], None]

    def list_sites(self) -> list[str]:
        """Return the sorted names of the sites that are currently connected.

        Raises:
            PerfedError: Two sites have the same name, or the server does not answer.
        """

    def wait_for(self, names: list[str], seconds: float) -> list[str]:
        """Wait at most ``seconds`` until all sites in ``names`` are connected.

        Returns:
            The sorted names of the sites that are still missing.

        Raises:
            PerfedError: Two sites have the same name.
        """

    def exchange(self, messages: Mapping[str, bytes], deadline: float, least: int = 0) -> Iterator[Answer]:
        """Send each site its message and yield the answers in order of arrival, one for each message.

        A site that is not connected, has disconnected, or is busy with an earlier message gets its message as soon as
        possible. At the deadline each site without a reply yields an answer with an error. If the iterator is closed
        early, the late replies of the remaining sites are dropped, and these sites get their next message only after
        that. After an interruption of the server, unanswered messages are sent again, so a site must give the same
        reply to a message that it has answered before.

        Args:
            messages: The bytes for each site, by its name.
            deadline: The time in seconds from now after which answers no longer count.
            least: The number of answers after which sites that are not connected are not waited for; 0 waits for all.

        Raises:
            PerfedError: Two sites have the same name.
        """


@dataclass(frozen=True)
class Connection:
    """One connection of a site to the message queue.

    Attributes:
        number: The number of the connection in the message queue; it may change when the site is restarted.
        site: The name of the site.
        location: An identifier of the machine and folder, if known. Two connections with the same name and location
            belong to one site that was restarted.
        activated: The time at which the connection was activated, as a text that sorts.
    """

    number: int
    site: str
    location: str = ""
    activated: str = ""


@dataclass(frozen=True)
class ReceivedMessage:
    """The reply to a message, or the error that occurred in its place.

    Attributes:
        message_id: The identifier of the message that was answered.
        body: The bytes of the reply; ``None`` for an error.
        error: The description of the error.
        may_retry: Whether the site may answer if the message is sent again, for example after a restart.
    """

    message_id: str
    body: bytes | None
    error: str = ""
    may_retry: bool = False


class MessageQueue(Protocol):
    """A queue that delivers messages; :class:`QueueTransport` calls it from one thread only."""

    def connections(self) -> Sequence[Connection]:
        """Return all connections that are alive."""

    def send(self, node: int, body: bytes, seconds: float) -> str:
        """Send a message that expires after ``seconds`` to the connection with the number ``node``; return its id."""

    def collect_replies(self, message_ids: Sequence[str]) -> Sequence[ReceivedMessage]:
        """Return the replies to these messages that have arrived since the last call, without waiting for more."""


POLL_SECONDS, POLL_SHARE = 0.1, 0.04
"""The shortest time in seconds between two polls for replies. In a long exchange the time between two polls is this
share of the time since it began, up to ``REFRESH_SECONDS``."""
REFRESH_SECONDS = 1.0
"""The time in seconds between two looks at the list of connections."""
EXTRA_LIFETIME = 60.0
"""The time in seconds that a message lives beyond its deadline, so that late replies can be removed from the queue and
clocks may differ by this much."""
RESEND_SECONDS = 60.0
"""The time in seconds after which a message to a connected site that has not answered is sent again. The time doubles
with each attempt. A server that was killed may have lost the message or the reply; a site stores its replies, so it
does no work twice."""
REMINDER_SECONDS = 30.0
"""The time in seconds without an answer after which a note names the missing sites; it doubles with each note."""
HANG_SECONDS, HANG_BYTES_PER_SECOND = 3.0, 1e6
"""A call of the message queue hangs if it takes this long and transfers fewer bytes per second than this rate."""


@dataclass(eq=False)
class _PendingMessage:
    site: str
    body: bytes
    exchange: int
    deadline: float  # by the monotonic clock
    connection: int = 0  # the number of the connection to which it was sent last
    sent_at: float = 0.0
    attempts: int = 0
    is_answered: bool = False  # a copy of it may still be in the queue
    earliest_retry: float = float("-inf")
    last_error: str = ""


class QueueTransport:
    """A :class:`~perfed.sites.flower.transport.Transport` over a :class:`MessageQueue`.

    Args:
        queue: The queue that delivers the messages.

    Attributes:
        note: A function that is called with a line from time to time while no answer arrives.
    """

    def __init__(self, queue: MessageQueue) -> None:
        self.note: Callable[[str], None] = lambda line: None
        self._queue = queue
        self._changed = threading.Condition()  # guards the fields below, which the thread changes for the caller
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._refreshed_at = float("-inf")
        self._polled_at = float("-inf")
        self._connections: dict[str, Connection] = {}
        self._name_conflict = ""
        self._unsent: dict[str, _PendingMessage] = {}  # by site
        self._sent: dict[str, _PendingMessage] = {}  # by message id, until it is answered
        self._answers: list[Answer] = []
        self._exchange = 0
        self._began = 0.0
        self._calling_since: float | None = None
        self._failure: BaseException | None = None

    def list_sites(self) -> list[str]:
        """Return the sorted names of the sites that are currently connected."""
        with self._wait_until(lambda: self._refreshed_at > 0, 2 * HANG_SECONDS):
            if self._refreshed_at < 0:
                raise PerfedError(f"the server has not answered for {2 * HANG_SECONDS:.1f} seconds")
            return sorted(self._connections)

    def wait_for(self, names: list[str], seconds: float) -> list[str]:
        """Wait at most ``seconds`` until all ``names`` are connected; return the names that are missing, sorted."""
        with self._wait_until(lambda: set(names) <= set(self._connections), seconds):
            return sorted(set(names) - set(self._connections))

    def exchange(self, messages: Mapping[str, bytes], deadline: float, least: int = 0) -> Iterator[Answer]:
        """Send each site its message and yield the answers in order of arrival, one for each message."""
        with self._wait_until(lambda: True, 0):
            self._exchange += 1
            self._began = time.monotonic()
            self._answers = []
            ends = self._began + deadline
            pending = [_PendingMessage(site, body, self._exchange, ends) for site, body in sorted(messages.items())]
            self._unsent = {message.site: message for message in pending}
            return self._receive_answers(self._exchange, set(messages), ends, len(messages) - least if least else -1)

    def close(self) -> None:
        """Stop the thread; messages that are not yet answered are dropped."""
        self._closed.set()

    @contextmanager
    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> Iterator[None]:
        """Wait at most ``seconds`` for ``condition``, then run the block of the ``with`` statement under the lock.

        Raises:
            PerfedError: Two sites have the same name.
            BaseException: The exception that has ended the thread.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_thread, name="perfed-transport", daemon=True)
            self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: bool(self._failure or self._name_conflict) or condition(), max(seconds, 0))
            if self._failure is not None:
                raise self._failure
            if self._name_conflict:
                raise PerfedError(self._name_conflict)
            yield

    def _receive_answers(self, exchange: int, missing: set[str], ends: float, dispensable: int) -> Iterator[Answer]:
        """Yield the answers of an exchange in order of arrival, and an error for each site that is too late.

        Args:
            exchange: The number of the exchange.
            missing: The names of the sites that have not answered yet.
            ends: The deadline by the monotonic clock.
            dispensable: If at most this many sites are missing and none of them is connected, they are not waited for.
        """

        def is_complete() -> bool:
            return len(missing) <= dispensable and not missing & self._connections.keys()

        pause = REMINDER_SECONDS
        next_note = time.monotonic() + pause
        try:
            while missing:
                seconds = min(next_note, ends) - time.monotonic()
                with self._wait_until(lambda: bool(self._answers) or is_complete(), seconds):
                    if self._exchange != exchange:
                        raise RuntimeError("the next exchange has begun")
                    answers, self._answers = self._answers, []
                    late = [] if answers else [self._make_timeout_answer(site) for site in sorted(missing)]
                    must_wait = not is_complete()
                if late and must_wait and time.monotonic() < ends:
                    self.note(f"still waiting: {shorten_list([answer.error for answer in late], 3)}")
                    pause, next_note = 2 * pause, time.monotonic() + 2 * pause
                    continue
                missing -= {answer.site for answer in answers or late}
                yield from answers or late
        finally:
            with self._changed:
                if self._exchange == exchange:
                    self._unsent = {}
                    self._exchange += 1  # none of its messages is open any more

    def _make_timeout_answer(self, site: str) -> Answer:
        """Return an answer whose error says why a site has not replied so far."""
        now = time.monotonic()
        seconds = now - self._began
        sent = [message for message in self._sent.values() if message.site == site and self._is_open(message)]
        unsent = [self._unsent[site]] if site in self._unsent else []
        reasons = [message.last_error for message in (*unsent, *sent) if message.last_error]
        if reasons:
            why = f"{reasons[0]}, and has not answered within {seconds:.1f} seconds"
        elif self._calling_since is not None and now - self._calling_since > HANG_SECONDS:
            why = f"the server has not answered for {now - self._calling_since:.1f} seconds"
        elif sent:
            why = f"no answer within {seconds:.1f} seconds"
        elif self._is_busy(site):
            why = f"still busy with an earlier message after {seconds:.1f} seconds"
        elif site in self._connections:
            why = f"its message could not be sent within {seconds:.1f} seconds"
        else:
            why = f"not connected within {seconds:.1f} seconds"
        return Answer(site, None, f"site '{site}': {why}", seconds)

    def _is_busy(self, site: str, ignored: _PendingMessage | None = None) -> bool:
        """Return whether a site still works on a message other than ``ignored``.

        An unconfirmed copy of an answered message does not count: the copy may be lost, and answering it takes no time.
        """
        return any(
            message.site == site and message is not ignored and not message.is_answered
            for message in self._sent.values()
        )

    def _is_open(self, message: _PendingMessage) -> bool:
        return message.exchange == self._exchange and not message.is_answered

    def _run_thread(self) -> None:
        """Refresh the connections, send messages and collect replies until the transport is closed."""
        try:
            while not self._closed.wait(POLL_SECONDS):
                if time.monotonic() - self._refreshed_at > REFRESH_SECONDS:
                    self._refresh_connections()
                self._send_messages()
                self._collect_replies()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    @contextmanager
    def _watch_call(self, size: int = 0) -> Iterator[list[int]]:
        """Measure a call of the message queue and send all open messages again if the call has hung.

        Args:
            size: The number of bytes that the call sends. The block adds the bytes that it receives to the list.
        """
        sizes = [size]
        began = self._calling_since = time.monotonic()
        yield sizes
        self._calling_since = None
        seconds = time.monotonic() - began
        if seconds > HANG_SECONDS and sum(sizes) < HANG_BYTES_PER_SECOND * seconds:
            self._requeue_open_messages()

    def _requeue_open_messages(self) -> None:
        """Put all unanswered messages of the exchange back, because a server that was killed may have lost them."""
        with self._changed:
            for message_id, message in list(self._sent.items()):
                if self._is_open(message):
                    del self._sent[message_id]
                    self._unsent[message.site] = message

    def _refresh_connections(self) -> None:
        """Read the list of connections, and put messages back whose site was restarted or has been silent for long."""
        with self._watch_call():
            listed = self._queue.connections()
        with self._changed:
            self._refreshed_at = time.monotonic()
            self._name_conflict = ""
            connections: dict[str, Connection] = {}
            for connection in sorted(listed, key=lambda connection: connection.activated):
                earlier = connections.get(connection.site)
                if earlier is not None and (earlier.location != connection.location or not connection.location):
                    self._name_conflict = (
                        f"two sites are called '{connection.site}'; every site needs a name of its own"
                    )
                connections[connection.site] = connection
            self._connections = connections
            now = time.monotonic()
            for message_id, message in list(self._sent.items()):
                current = connections.get(message.site)
                if current is None:
                    continue
                if current.number != message.connection:
                    error = "it was started again before it answered"
                    self._handle_reply(ReceivedMessage(message_id, None, error, may_retry=True))
                elif self._is_open(message) and now - message.sent_at > RESEND_SECONDS * 2 ** (message.attempts - 1):
                    self._unsent[message.site] = message
            self._changed.notify_all()

    def _send_messages(self) -> None:
        """Send each waiting message whose site is connected and not busy."""
        with self._changed:
            now = time.monotonic()
            ready = [
                (message, self._connections[site].number)
                for site, message in self._unsent.items()
                if site in self._connections
                and not self._is_busy(site, message)
                and message.earliest_retry < now < message.deadline
            ]
        for message, connection in ready:
            message.connection = connection
            lifetime = max(message.deadline - time.monotonic(), 0) + EXTRA_LIFETIME
            with self._watch_call(len(message.body)):
                message_id = self._queue.send(connection, message.body, lifetime)
            with self._changed:
                self._sent[message_id] = message
                message.sent_at = time.monotonic()
                message.attempts += 1
                if self._unsent.get(message.site) is message:
                    del self._unsent[message.site]

    def _collect_replies(self) -> None:
        """Fetch the replies that have arrived, at most as often as the time since the beginning allows."""
        with self._changed:
            message_ids = list(self._sent)
            now = time.monotonic()
            pause = min(POLL_SHARE * (now - self._began), REFRESH_SECONDS)  # each poll costs the server 10 ms
        if not message_ids or now - self._polled_at < pause:
            return
        with self._watch_call() as sizes:
            replies = self._queue.collect_replies(message_ids)
            sizes += [len(reply.body or b"") for reply in replies]
            with self._changed:
                self._polled_at = time.monotonic()
                for reply in replies:
                    self._handle_reply(reply)
                self._changed.notify_all()

    def _handle_reply(self, reply: ReceivedMessage) -> None:
        """Turn a reply into an answer of the current exchange, or put its message back if it may be retried.

        A site works on one message after the other. Messages that were sent to it before the answered one are
        therefore answered or lost, and are removed too. Replies to messages of earlier exchanges are dropped.
        """
        message = self._sent.get(reply.message_id)
        if message is None:
            return
        of_site = [message_id for message_id, sent in self._sent.items() if sent.site == message.site]
        finished = of_site[: of_site.index(reply.message_id) + 1]
        for message_id in finished[-1:] if reply.may_retry else finished:
            del self._sent[message_id]
        if not self._is_open(message) or (reply.may_retry and message in self._sent.values()):
            return
        if reply.may_retry:
            message.last_error, message.earliest_retry = reply.error, time.monotonic() + REFRESH_SECONDS
            self._unsent[message.site] = message
            return
        message.is_answered = True
        self._unsent.pop(message.site, None)
        error = f"site '{message.site}': {reply.error}" if reply.body is None else ""
        self._answers.append(Answer(message.site, reply.body, error, time.monotonic() - self._began))
