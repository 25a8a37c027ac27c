"""GPFL by its formulas in plain torch, without perfed's engine, on PFLlib's Fashion-MNIST: how slowly it starts.

python benchmarks/gpfl_plain.py [ROUNDS] [CLIENTS] [SAMPLES]   (the first CLIENTS of 20, at most SAMPLES rows of each)

With what the authors' program does otherwise than the paper: conditions of the embeddings as each client sent them
(zeros in the first round), and the root of the sum of squares over the mini-batch as the distance to them.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from usage import usage

from perfed import load

FEATURES, CLASSES, LR, LAM, MU = 512, 10, 0.005, 0.01, 0.1


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.LayerNorm(FEATURES))


def body() -> nn.Sequential:
    convolutions = [nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(1024, FEATURES), nn.ReLU())


def parameters(*modules: nn.Module) -> list[Tensor]:
    return [p for module in modules for p in module.parameters()]


def valve(f: Tensor, condition: Tensor, gamma: nn.Module, beta: nn.Module) -> Tensor:
    return torch.relu((1 + gamma(condition)) * f + beta(condition))


def main(rounds: int = 10, clients: int = 20, samples: int = 10_000) -> None:
    torch.manual_seed(0)
    data = load("pfllib-fashion", {"partition": "pathological"}, seed=0).clients[:clients]
    shared = body(), net(), net(), nn.Embedding(CLASSES, FEATURES)
    heads = [nn.Linear(FEATURES, CLASSES) for _ in data]
    shares = [torch.bincount(c.train.y, minlength=CLASSES).float() / len(c.train.y) for c in data]
    conditions = [(torch.zeros(FEATURES), torch.zeros(FEATURES)) for _ in data]
    for number in range(1, rounds + 1):
        sent, sizes = [], []
        for i, client in enumerate(data):
            own = copy.deepcopy(shared)
            f_of, gamma, beta, embeddings = own
            received = embeddings.weight.detach().clone()
            plain, decayed = parameters(f_of, heads[i]), parameters(gamma, beta, embeddings)
            groups: list[dict[str, Any]] = [{"params": plain}, {"params": decayed, "weight_decay": MU}]
            optimizer = torch.optim.SGD(groups, lr=LR)
            order = torch.randperm(len(client.train.y))[:samples]
            for rows in order.split(10):
                f, y = f_of(client.train.x[rows]), client.train.y[rows]
                general, personal = (valve(f, condition, gamma, beta) for condition in conditions[i])
                angles = normalize(general) @ normalize(embeddings.weight).T
                loss = cross_entropy(heads[i](personal), y) + cross_entropy(angles, y)
                optimizer.zero_grad()
                (loss + LAM * (general - received[y]).norm()).backward()
                optimizer.step()
            last = embeddings.weight.detach()
            conditions[i] = last.mean(0), shares[i] @ last
            sent.append([p.detach() for p in parameters(*own)])
            sizes.append(len(order))
        with torch.no_grad():
            for parameter, *values in zip(parameters(*shared), *sent, strict=True):
                parameter.copy_(torch.stack([n * v for n, v in zip(sizes, values, strict=True)]).sum(0) / sum(sizes))
            f_of, gamma, beta, _ = shared
            right = total = 0
            for client, head, (_, condition) in zip(data, heads, conditions, strict=True):
                assert client.test is not None
                found = head(valve(f_of(client.test.x), condition, gamma, beta)).argmax(1)
                right, total = right + int((found == client.test.y).sum()), total + len(found)
            scale = float(beta.get_parameter("2.weight").mean())
        print(f"round {number}: {100 * right / total:.1f} %, scale of the valve's shift {scale:.2f}", flush=True)


if __name__ == "__main__":
    usage(__doc__)
    main(*map(int, sys.argv[1:]))
