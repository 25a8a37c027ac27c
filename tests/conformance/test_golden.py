"""What methods of every program shape give is what they gave: numbers kept from an earlier commit, on three engines.

``python tests/conformance/test_golden.py`` writes the numbers anew, for a change that is meant to change results; the
commit's message says why.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engines import CodecEngine

from perfed import resume, start, validate
from perfed.codec import flatten
from perfed.engine.server import Server
from perfed.experiment.config import find_experiment
from perfed.experiment.overrides import override
from perfed.run.directory import RunDirectory
from perfed.run.run import Run

KEPT = Path(__file__).with_suffix(".json")
METHODS = {
    "fedavg": (),  # one exchange, one set of parameters
    "fedavg-ft": (),  # personalised when it is evaluated
    "fedrep": (),  # head, then body
    "ditto": (),  # two models a client
    "pfedme": (),  # a step rule of its own
    "hf-maml": (),  # two gradients a step, by finite differences
    "scaffold": (),  # states that correct gradients
    "fedpac": (),  # two exchanges, heads combined by quadratic programs
    "flic-hl": ("methods.flic-hl.pretrain_epochs=1",),  # a preparation, anchors
    "fedproto": (),  # no shared parameters
    "feddar-wa": (),  # heads of domains
    "knnper": (),  # a memory when it is evaluated
    "fedem": (),  # several models
    "fedrep-srpfl": (),  # a policy of participation
}
SMALL = ("rounds=4", "local_epochs=1", "clients=4", "samples=8", "test_samples=16", "dtype=float64", "plan.threads=1")
ENGINES: dict[str, tuple[str, type[Server] | partial[Server]]] = {
    "stacked": ("stacked", Server),
    "sequential": ("sequential", Server),
    "codec": ("stacked", partial(Server, engine=CodecEngine)),
}


def made(method: str, engine: str, out: Path) -> Run:
    """A run that has not begun."""
    name, server = ENGINES[engine]
    settings = [*SMALL, *METHODS[method], f"plan.engine={name}"]
    table = {**override(find_experiment("digits-all-methods"), settings, [method]), "method": method}
    return start(validate(table), out=out, server=server)


def numbers(run: Path) -> dict[str, Any]:
    """Sum and sum of squares of each tensor, of clients' states over all clients, and the summary's metrics."""
    content, found = RunDirectory(run).load(), dict[str, list[float]]()
    assert content is not None
    for owner, tree in {
        "server": content.server,
        **{f"client {name}": s for name, s in content.clients.items()},
    }.items():
        for name, tensor in flatten(tree).items():
            value = tensor.double()
            sums = found.setdefault(f"{owner.partition(' ')[0]}/{name}", [0.0, 0.0])
            sums[0] += float(value.sum())
            sums[1] += float(value.square().sum())
    return {"tensors": found, "metrics": json.loads((run / "summary.json").read_text())["metrics"]}


def flat(found: Any, path: str = "") -> dict[str, Any]:
    """Every number by where it stands."""
    parts = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else None
    return (
        {path: found} if parts is None else {k: v for name, of in parts for k, v in flat(of, f"{path}/{name}").items()}
    )


class Interrupted(Exception):
    """Ends a run in the middle."""


def interrupt(number: int, *_: object) -> None:
    if number == 2:
        raise Interrupted


@pytest.mark.parametrize("method", METHODS)
def test_numbers_are_those_that_were_kept(method, tmp_path):
    kept = flat(json.loads(KEPT.read_text())[method])
    for engine in ENGINES:
        made(method, engine, tmp_path / engine).execute()
        found = flat(numbers(tmp_path / engine))
        assert found.keys() == kept.keys(), engine
        assert found == pytest.approx(kept, rel=1e-6, abs=1e-9), engine
    with pytest.raises(Interrupted):
        made(method, "stacked", tmp_path / "resumed").execute(interrupt)
    resume(tmp_path / "resumed").execute()
    assert numbers(tmp_path / "resumed") == numbers(tmp_path / "stacked")


def main() -> None:
    """Write the numbers of all methods."""
    found = {}
    for method in METHODS:
        with tempfile.TemporaryDirectory() as folder:
            made(method, "stacked", Path(folder) / "run").execute()
            found[method] = numbers(Path(folder) / "run")
    KEPT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
