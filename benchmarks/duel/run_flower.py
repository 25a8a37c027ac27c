"""Flower's side of the duel: its simulation on Ray (``pip install "flwr[simulation]" torch``)."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import problem as duel
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn

FOLDER = "DUEL_FOLDER"
Weights = dict[str, Tensor]


@cache
def read() -> Any:
    """Read the problem once a process."""
    return duel.read(Path(os.environ[FOLDER]))


def steps(model: nn.Module, parameters: list[nn.Parameter], rows: Any, pull: tuple[float, list[Tensor]] | None) -> None:
    """Take one epoch of plain SGD; ``pull`` adds Ditto's gradient towards the weights received."""
    problem = read()[0]
    x, y = torch.from_numpy(rows[0]), torch.from_numpy(rows[1])
    optimizer = torch.optim.SGD(parameters, problem.rate)
    for index in torch.randperm(len(y)).split(problem.batch):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[index]), y[index]).backward()
        if pull is not None:
            for p, centre in zip(parameters, pull[1], strict=True):
                assert p.grad is not None
                p.grad.add_(p.detach() - centre, alpha=pull[0])
        optimizer.step()


def train(message: Message, context: Context) -> Message:
    """Train one client: what is its own stays in its context."""
    problem, rows, _, weights = read()
    mine = rows[int(context.node_config["partition-id"])]
    received = message.content.array_records["arrays"].to_torch_state_dict()
    own = context.state.array_records.get("own")
    model = duel.build(problem.model)
    model.load_state_dict(
        weights | (own.to_torch_state_dict() if own and problem.method == "fedrep" else {}) | received
    )
    if problem.method == "fedrep":
        model.body.requires_grad_(False)
        for _ in range(problem.head_epochs):
            steps(model, list(model.head.parameters()), mine, None)
        model.body.requires_grad_(True)
        model.head.requires_grad_(False)
        steps(model, list(model.body.parameters()), mine, None)
        kept = {k: v for k, v in model.state_dict().items() if k.startswith("head")}
        context.state["own"] = ArrayRecord({k: Array(v.numpy()) for k, v in kept.items()})
    else:
        steps(model, list(model.parameters()), mine, None)
    if problem.method == "ditto":
        personal = duel.build(problem.model)
        personal.load_state_dict(own.to_torch_state_dict() if own else weights)
        centre = [received[name] for name, _ in personal.named_parameters()]
        steps(personal, list(personal.parameters()), mine, (problem.pull, centre))
        context.state["own"] = ArrayRecord(personal.state_dict())
    sent = {k: v for k, v in model.state_dict().items() if k in received}
    metrics = MetricRecord({"num-examples": len(mine[1])})
    return Message(RecordDict({"arrays": ArrayRecord(sent), "metrics": metrics}), reply_to=message)


def evaluate(message: Message, context: Context) -> Message:
    """Return the accuracy of the model that this client would use."""
    problem, _, test, weights = read()
    model = duel.build(problem.model)
    own = context.state.array_records.get("own")
    received = message.content.array_records["arrays"].to_torch_state_dict()
    model.load_state_dict(weights | received | (own.to_torch_state_dict() if own else {}))
    score = duel.accuracy(lambda _: model, [test[int(context.node_config["partition-id"])]])
    return Message(RecordDict({"metrics": MetricRecord({"accuracy": score, "num-examples": 1})}), reply_to=message)


class AtTheEnd(FedAvg):
    """FedAvg whose clients evaluate after the last round alone."""

    def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        """Ask for nothing before the last round."""
        last = server_round == read()[0].rounds
        return super().configure_evaluate(server_round, arrays, config, grid) if last else []


def run(folder: Path) -> dict[str, Any]:
    """Train and return the clock's result."""
    os.environ[FOLDER] = str(folder.absolute())
    problem, _, _, weights = read()
    shared = {k: v for k, v in weights.items() if problem.method != "fedrep" or k.startswith("body")}
    out: dict[str, Any] = {}
    client, server = ClientApp(), ServerApp()
    client.train()(train)
    client.evaluate()(evaluate)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        clock = duel.Clock()

        def lap(round_: int, arrays: ArrayRecord) -> None:
            if round_:
                clock.lap()

        strategy = AtTheEnd(fraction_train=1.0, fraction_evaluate=1.0, min_available_nodes=problem.clients)
        done = strategy.start(grid, ArrayRecord(shared), problem.rounds, train_config=ConfigRecord({}), evaluate_fn=lap)
        out.update(clock.result(float(str(done.evaluate_metrics_clientapp[problem.rounds]["accuracy"]))))

    run_simulation(
        server, client, problem.clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}},
    )  # fmt: skip
    return out


if __name__ == "__main__":
    import run_flower  # by its name, so that Ray's workers import it too

    duel.main(run_flower.run)
