"""FedRep against a plain loop of torch modules and optimisers."""

from __future__ import annotations

import copy

import torch
from engines import blobs, make, network, serve
from torch import nn

from perfed.model.chain import stage_of


def test_one_round_is_the_algorithm_box():
    """Head epochs from the own head, body epochs with the new head, mean of the representations by samples."""
    federation, lr = blobs((12, 7, 5)), 0.1
    method = make("fedrep", optimizer="sgd", lr=lr, batch_size=100, local_epochs=3, body_epochs=2)
    server = serve(method, federation)
    server.prepare()
    chain = network().build((4,)).double()
    start = dict(server.state.shared)
    initial = server.initialiser.draw_initial((4,), chain.stages)
    chain.load_state_dict(initial | start)
    bodies, heads = [], {}
    for client in server.federation:
        own = copy.deepcopy(chain)
        for epochs, part in ((3, ("head",)), (2, ("embedding", "body"))):
            optimiser = torch.optim.SGD([p for n, p in own.named_parameters() if stage_of(n) in part], lr=lr)
            for _ in range(epochs):
                optimiser.zero_grad()
                nn.functional.cross_entropy(own(client.train.x), client.train.y).backward()
                optimiser.step()
        values = {name: tensor.detach() for name, tensor in own.state_dict().items()}
        bodies.append({name: values[name] for name in start})
        heads[client.id] = {name: values[name] for name in values if name not in start}
    server.round(1)
    shares = torch.tensor([12, 7, 5], dtype=torch.float64) / 24
    for name, found in server.state.shared.items():
        expected = sum(share * body[name] for share, body in zip(shares, bodies, strict=True))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for client, head in heads.items():
        for name, expected in head.items():
            torch.testing.assert_close(server.engine.states[client]["model"][name], expected, rtol=1e-10, atol=1e-12)
