"""The settings of a deployment on which all its files depend: its server, its addresses and its sites."""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import tomli_w

from perfed.data.names import quote_name
from perfed.errors import PerfedError

FILE = "deployment.toml"
"""The file of the :class:`Deployment` in the deployment's directory."""
CONNECTION = "deployment"
"""The name of the connection to the SuperLink in the ``config.toml`` of Flower's command line."""

_LOOPBACK = ("127.0.0.1", "localhost")
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PATH = re.compile(r"/[\w./+-]*")
_LONGEST_APP = 32
"""The largest number of characters that Flower allows in an app's name."""


@dataclass(frozen=True)
class Deployment:
    """A server and its sites.

    Attributes:
        name: the name of the study.
        sites: the names of the sites, sorted.
        directory: the absolute path of the deployment on the server.
        tls: whether sites connect with TLS through a proxy and authenticate with a key; otherwise everything runs on
            one machine, for a trial.
        host: the name or address by which sites reach the server.
        port: the port of the proxy; not used without TLS, when sites connect to the SuperLink directly.
        superlink_port: the port of the SuperLink on the server's loopback address.
        server_names: further names and addresses in the server's certificate.

    Raises:
        PerfedError: the study's name is not possible in files of systemd or Flower; a site is named twice or its name
            has characters that are not allowed; a name, address, port or path is invalid; or the server is another
            machine and there is no TLS.

    Example:
        >>> Deployment("heart", ("north", "south"), "/srv/heart", tls=True, host="fed.example.org").address
        'fed.example.org:8443'
    """

    name: str
    sites: tuple[str, ...]
    directory: str
    tls: bool = False
    host: str = "127.0.0.1"
    port: int = 8443
    superlink_port: int = 8000
    server_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_name(self.name)
        _check_sites(self.sites)
        object.__setattr__(self, "sites", tuple(sorted(self.sites)))
        for name in (self.host, *self.server_names):
            _check_host(name)
        for option, port in (("--port", self.port), ("--superlink-port", self.superlink_port)):
            if not 1 <= port <= 65535:
                raise PerfedError(f"{option} {port}: must be from 1 to 65535")
        if self.tls and self.port == self.superlink_port:
            raise PerfedError(f"--port {self.port}: the SuperLink's own (--superlink-port); the proxy needs another")
        if not self.tls and self.host not in _LOOPBACK:
            raise PerfedError(
                f"--host {self.host}: without --tls nothing is encrypted and a site could take another's name; add "
                f"--tls, or try it on one machine (--host {_LOOPBACK[0]})"
            )
        if not self.tls and self.server_names:
            raise PerfedError("--server-name: names of the server's certificate, which --tls makes; add --tls")
        if not _PATH.fullmatch(self.directory):
            raise PerfedError(
                f"--dir-on-server {self.directory!r}: must be absolute, of letters, digits and . _ - + / alone: it "
                "stands in files of systemd and of the proxy"
            )

    @property
    def listens_on_ipv6(self) -> bool:
        """Whether sites may reach the proxy by an IPv6 address."""
        return any(":" in name for name in (self.host, *self.server_names))

    @property
    def address(self) -> str:
        """The address to which sites connect, ``HOST:PORT``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port if self.tls else self.superlink_port}"

    @property
    def certified_names(self) -> tuple[str, ...]:
        """The names and addresses in the server's certificate; the proxy and Flower itself use the loopback ones."""
        return tuple(dict.fromkeys((self.host, *self.server_names, "localhost", "127.0.0.1")))

    def to_toml(self) -> str:
        """Return the text of :data:`FILE`, from which :meth:`read` restores the same deployment."""
        return tomli_w.dumps({key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()})

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the deployment in ``folder``.

        Raises:
            PerfedError: ``folder`` holds no deployment, or its :data:`FILE` cannot be read.
        """
        file = folder / FILE
        if not file.is_file():
            raise PerfedError(f"{folder}: no deployment is there ('perfed deploy EXPERIMENT --out {folder}' makes one)")
        try:
            table = tomllib.loads(file.read_text(encoding="utf-8"))
            settings: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}
            return cls(**settings)
        except PerfedError as error:
            raise PerfedError(f"{file}: {error}") from None
        except (OSError, ValueError, TypeError) as error:
            raise PerfedError(f"{file}: cannot be read: {error}") from None

    def with_sites(self, names: Sequence[str]) -> Self:
        """Return a copy of this deployment with further sites.

        Raises:
            PerfedError: a name is already used or not allowed.
        """
        return replace(self, sites=(*self.sites, *names))


def app_name(study: str) -> str:
    """Return the name of the Flower app of a study of this name.

    Example:
        >>> app_name("Heart study")
        'perfed-Heart-study'
    """
    return f"perfed-{re.sub(r'[^A-Za-z0-9]+', '-', study).strip('-')}".rstrip("-")


def _check_name(study: str) -> None:
    """Refuse a name that would add a line to a systemd unit or a script, or that is too long for Flower."""
    if not study.isprintable():
        raise PerfedError(
            f"name = {quote_name(study)}: a study's name stands in files of systemd; it may hold neither line breaks "
            "nor other control characters"
        )
    if len(app := app_name(study)) > _LONGEST_APP:
        raise PerfedError(
            f"name = {quote_name(study)}: Flower takes apps whose names have at most {_LONGEST_APP} characters, and "
            f"this study's would be '{app}' ({len(app)}); give the study a shorter name"
        )


def _check_sites(sites: Sequence[str]) -> None:
    if not sites:
        raise PerfedError("--sites: at least one name is needed, e.g. --sites north,south")
    for name in sites:
        if not _SITE.fullmatch(name):
            raise PerfedError(
                f"--sites: '{name}' cannot be a site's name; allowed are letters, digits and . _ - , a letter or digit "
                "first, 63 at most"
            )
    names_by_lower_case: dict[str, str] = {}
    for name in sites:
        if name.lower() in names_by_lower_case:
            same_name = names_by_lower_case[name.lower()]
            raise PerfedError(f"--sites: '{name}' is there already ('{same_name}'); names must differ")
        names_by_lower_case[name.lower()] = name


def _check_host(name: str) -> None:
    """Refuse a text that is neither a host name nor an IP address; zones (``%eth0``) are refused as well."""
    try:
        ipaddress.ip_address(name.replace("%", " "))
    except ValueError:
        if len(name) > 253 or not _HOST.fullmatch(name) or re.fullmatch(r"[\d.]+", name):
            raise PerfedError(
                f"'{name}' is no host: a name as fed.example.org or an address is needed, without a port or https://"
            ) from None
