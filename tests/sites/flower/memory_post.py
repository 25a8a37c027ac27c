"""A post office in memory: every site is a thread with a handler, and can be told to delay, fail, drop or be away."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from perfed.sites.flower.transport import Connection, ReceivedMessage

Handler = Callable[[bytes], bytes]


class MemoryQueue:
    """Sites by name; one message at a time at each, as sites have it.

    Attributes:
        delay: seconds that a site takes for each message.
        fail: what a site's error replies say.
        gone: sites that the office says are gone, for each of their messages.
        drop: sites that never reply.
        away: sites that are not connected.
        hang: while it is set, every call of the office hangs, as Flower's do while the server is away.
        got: the messages that each site has begun to work on.
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
        self._letters = count(1)
        self._came: dict[str, ReceivedMessage] = {}
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
        letter = str(next(self._letters))
        sites = {number: site for site, number in self.numbers.items()}
        sites |= {extra.number: extra.site for extra in self.extra}
        self._queues[sites[node]].put((letter, body))
        return letter

    def collect_replies(self, message_ids: Sequence[str]) -> list[ReceivedMessage]:
        self.wait_while_hung()
        return [self._came.pop(letter) for letter in message_ids if letter in self._came]

    def wait_while_hung(self) -> None:
        while self.hang.is_set():
            time.sleep(0.01)

    def work(self, site: str, handler: Handler) -> None:
        while True:
            letter, body = self._queues[site].get()
            self.got[site].append(body)
            time.sleep(self.delay.get(site, 0))
            if site in self.fail:
                self._came[letter] = ReceivedMessage(letter, None, self.fail[site])
            elif site in self.gone:
                self._came[letter] = ReceivedMessage(letter, None, "it is gone", may_retry=True)
            elif site not in self.drop:
                self._came[letter] = ReceivedMessage(letter, handler(body))
