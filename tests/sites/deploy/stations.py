"""Three stations with tables in the place of a network: a deployment's sites, asked by the server's own server_app."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file

from perfed.experiment.config import validate
from perfed.experiment.start import start
from perfed.sites.deploy import server_app
from perfed.sites.deploy.policy import Policy
from perfed.sites.deploy.site_agent import SiteAgent
from perfed.sites.deploy.spending import SECRET
from perfed.sites.deploy.study import make_deployed_study
from perfed.sites.flower.transport import Answer

PUBLIC = {"ill": ["ill", "well"], "smoker": ["no", "yes"], **{name: [-6, 6] for name in ("age", "sugar", "pulse")}}
COLUMNS = {"north": ["age", "sugar"], "south": ["age", "pulse", "smoker"], "west": ["pulse", "sugar"]}
TABLE = {
    "method": "flic-hl",
    "rounds": 3,
    "model": {"embedding": {"kind": "linear", "out": 4}, "body": {"kind": "hidden-layer", "out": 4}, "head": "linear"},
    "training": {"lr": 1e-2, "local_epochs": 1, "batch_size": 16},
    "methods": {"flic-hl": {"pretrain_epochs": 1}},
    "plan": {"engine": "sequential", "threads": 1},
    "evaluation": {"every": 3},
}


def write_tables(path: Path) -> None:
    generator = np.random.default_rng(0)
    for site, columns in COLUMNS.items():
        risk = generator.normal(size=40)
        table = {name: (risk + generator.normal(size=40)).round(2) for name in columns}
        if "smoker" in table:
            table["smoker"] = np.where(table["smoker"] > 0, "yes", "no")
        table["ill"] = np.where(risk > 0, "ill", "well")
        pd.DataFrame(table).to_csv(path / f"{site}.csv", index=False)


def study(path: Path, known: Mapping[str, object] = PUBLIC, **changes: object) -> str:
    """A study of the three tables; a private one says of columns what is ``known``."""
    files = [str(path / f"{site}.csv") for site in COLUMNS]
    public = {"public": known} if "privacy" in changes else {}
    table = {**TABLE, "data": {"name": "tables", "files": files, "target": "ill", **public}, **changes}
    return make_deployed_study(validate(table), list(COLUMNS)).to_toml()


class Stations:
    """The sites of a deployment as a transport; each exchange is counted, and all that leaves is kept."""

    def __init__(
        self,
        path: Path,
        study: str | None = None,
        policy: Policy | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.at = {s: SiteAgent(path / f"at-{s}", s, path / f"{s}.csv", study, note, policy) for s in COLUMNS}
        self.left: dict[str, list[bytes]] = {site: [] for site in COLUMNS}
        self.missing: list[str] = []
        self.stop_after = -1
        self.note: Callable[[str], None] = print

    def list_sites(self) -> list[str]:
        return sorted(set(self.at) - set(self.missing))

    def wait_for(self, names: list[str], seconds: float) -> list[str]:
        time.sleep(seconds if self.missing else 0)
        return self.missing

    def exchange(self, messages: Mapping[str, bytes], deadline: float, least: int = 0) -> Iterator[Answer]:
        if self.stop_after == 0:
            raise KeyboardInterrupt
        self.stop_after -= 1
        for site, message in sorted(messages.items()):
            reply = self.at[site].answer(message)
            self.left[site].append(reply)
            yield Answer(site, reply, "", 1.0)

    def close(self) -> None:
        for site in self.at.values():
            site.close()


def answer_all(path: Path, text: str, transport: Stations, name: str = "run") -> None:
    server_app.main(transport, {"out": str(path / name), "wait": 1.0, "deadline": 60.0}, study=text)


def submit(path: Path, text: str, transport: Stations | None = None) -> Stations:
    transport = transport or Stations(path)
    with closing(transport):
        answer_all(path, text, transport)
    return transport


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """What the server has, but for the clients' own states, which stay at the sites."""
    found = load_file(max((run / "checkpoint").glob("server-*.safetensors")))
    return {name: tensor for name, tensor in found.items() if not name.startswith(":best/clients")}


def same_as_simulated(path: Path, **changes: object) -> None:
    files = [str(path / f"{site}.csv") for site in COLUMNS]
    table = {**TABLE, "data": {"name": "tables", "files": files, "target": "ill"}, **changes}
    start(validate(table), out=path / "simulated").execute()
    found, expected = tensors(path / "run"), tensors(path / "simulated")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def interrupted_by(stations: Stations, exchanges: int, act: Callable[[], None]) -> None:
    """``act``, in which the sites may be asked by others, before they are asked for the ``exchanges``-th time."""
    ask, count = stations.exchange, [0]

    def exchange(messages: Mapping[str, bytes], deadline: float, least: int = 0) -> Iterator[Answer]:
        count[0] += 1
        if count[0] == exchanges:
            act()
        return ask(messages, deadline)

    stations.exchange = exchange  # type: ignore[method-assign]


def secrets_of(path: Path) -> dict[Path, bytes]:
    """What the noise of sites and server is drawn from."""
    return {file: file.read_bytes() for file in path.rglob(SECRET)}


def wiped(path: Path, secrets: dict[Path, bytes]) -> None:
    """Everything is forgotten but ``secrets``."""
    for folder in [path / "run", *(path / f"at-{site}" for site in COLUMNS)]:
        shutil.rmtree(folder, ignore_errors=True)
    for file, content in secrets.items():
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
        file.chmod(0o600)
