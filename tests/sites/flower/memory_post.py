"""A message queue in memory: every site is a thread with a handler and can delay, fail, drop or be disconnected."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from perfed.sites.flower.transport import Connection, ReceivedMessage

Handler = Callable[[bytes], bytes]


class MemoryQueue:
    """A message queue whose sites work on one message at a time, as real sites do.

    Attributes:
        delay: The seconds that a site takes for each message, by site.
        fail: The error with which a site replies, by site.
        gone: The sites whose messages the queue answers with the error that the site is gone.
        drop: The sites that never reply.
        away: The sites that are not connected.
        hang: An event; while it is set, every call of the queue hangs, as Flower's calls do without a server.
        got: The messages that each site has begun to work on.
    """

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self.delay: dict[str, float] = {}
        self.fail: dict[str, str] = {}
        self.drop: set[str] = set()
        self.gone: set[str] = set()
        self.away: set[str] = set()
        self.hang = threading.Event()
        self.got: dict[str, list[bytes]] = {site: [] for site in handlers}
        self.extra: list[Connection] = []
        self.numbers = {site: number for number, site in enumerate(sorted(handlers), start=1)}
        self._ids = count(1)
        self._replies: dict[str, ReceivedMessage] = {}
        self._queues: dict[str, queue.Queue[tuple[str, bytes]]] = {}
        for site, handler in handlers.items():
            self._queues[site] = queue.Queue()
            threading.Thread(target=self.work, args=(site, handler), daemon=True).start()

    def connections(self) -> list[Connection]:
        self.wait_while_hung()
        here = [Connection(number, site, "here", "1") for site, number in self.numbers.items() if site not in self.away]
        return here + self.extra

    def send(self, node: int, body: bytes, seconds: float) -> str:
        self.wait_while_hung()
        message_id = str(next(self._ids))
        sites = {number: site for site, number in self.numbers.items()}
        sites |= {extra.number: extra.site for extra in self.extra}
        self._queues[sites[node]].put((message_id, body))
        return message_id

    def collect_replies(self, message_ids: Sequence[str]) -> list[ReceivedMessage]:
        self.wait_while_hung()
        return [self._replies.pop(message_id) for message_id in message_ids if message_id in self._replies]

    def wait_while_hung(self) -> None:
        while self.hang.is_set():
            time.sleep(0.01)

    def work(self, site: str, handler: Handler) -> None:
        while True:
            message_id, body = self._queues[site].get()
            self.got[site].append(body)
            time.sleep(self.delay.get(site, 0))
            if site in self.fail:
                self._replies[message_id] = ReceivedMessage(message_id, None, self.fail[site])
            elif site in self.gone:
                self._replies[message_id] = ReceivedMessage(message_id, None, "it is gone", may_retry=True)
            elif site not in self.drop:
                self._replies[message_id] = ReceivedMessage(message_id, handler(body))
