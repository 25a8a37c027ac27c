"""What the server side needs of a network: bytes out to sites by name, bytes back, and no wait without an end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol


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

    def exchange(self, messages: Mapping[str, bytes], deadline: float) -> Iterator[Answer]:
        """Send each site its message and give the answers as they come, one for each message.

        A site that is not connected, has gone, or is busy with an earlier message gets it as soon as it can. At the
        deadline every site that is missing gives an answer with an error. Closing the iterator early leaves the others
        busy: their late replies are dropped, and only then they get a next message. After the server was away, what was
        on its way is sent once more: a site has to answer a message that it has answered before as it did then.

        Args:
            messages: bytes by name of the site.
            deadline: seconds from now until which answers count.

        Raises:
            PerfedError: two sites have one name.
        """
