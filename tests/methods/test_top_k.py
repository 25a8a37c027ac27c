"""The largest entries of updates, with error feedback: by hand, by bytes, and around other methods."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engines import ENGINES, blobs, difference, make, network, quick, serve, train

from perfed import load
from perfed.errors import PerfedError
from perfed.methods.extensions.clip import Clip
from perfed.methods.extensions.proximal import Proximal
from perfed.methods.extensions.top_k import TopK
from perfed.methods.fedavg import FedAvg
from perfed.model.chain import Model
from perfed.model.presets import linear, mlp


def test_rounds_by_hand_with_what_was_not_sent_remembered():
    federation, lr, keep = blobs((6, 9)), 0.5, 0.2
    method = quick(FedAvg, extensions=(TopK(keep=keep),), optimizer="sgd", lr=lr, batch_size=99, local_epochs=1)
    server = serve(method, federation, model=Model(head=linear(3)))
    names = list(server.state.shared)
    w = np.concatenate([server.state.shared[name].numpy().ravel() for name in names])
    shapes = {name: tuple(server.state.shared[name].shape) for name in names}
    memory, kept = np.zeros((2, len(w))), int(np.ceil(keep * len(w)))
    for number in range(1, 5):
        sent = []
        for row, client in enumerate(server.federation):
            x, y = client.train.x.numpy(), client.train.y.numpy()
            parts = dict(zip(names, np.split(w, np.cumsum([np.prod(s) for s in shapes.values()])[:-1]), strict=True))
            weight, bias = (parts[f"head.{part}"].reshape(shapes[f"head.{part}"]) for part in ("weight", "bias"))
            scores = np.exp(x @ weight.T + bias)
            error = (scores / scores.sum(1, keepdims=True) - np.eye(3)[y]) / len(x)
            slope = {"head.weight": error.T @ x, "head.bias": error.sum(0)}
            change = memory[row] - lr * np.concatenate([slope[name].ravel() for name in names])
            largest = np.argsort(-abs(change))[:kept]
            sent.append(np.where(np.isin(np.arange(len(w)), largest), change, 0))
            memory[row] = change - sent[-1]
        w = w + (6 * sent[0] + 9 * sent[1]) / 15
        server.round(number)
        found = np.concatenate([server.state.shared[name].numpy().ravel() for name in names])
        np.testing.assert_allclose(found, w, rtol=1e-9, atol=1e-12)
    assert abs(memory).max() > 1e-3


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "fedpac"])
def test_bytes_up_fall_fivefold(name):
    federation = load("digits", {"clients": 4}, seed=0)
    model = Model(body=mlp((256,), 128), head=linear(10))
    plain, sparse = (
        train(serve(make(name, more_extensions=more), federation, model=model, dtype=torch.float32), 1).round(2)
        for more in ((), (TopK(keep=0.1),))
    )
    parameters = sum(t.numel() for t in serve(make(name), federation, model=model).state.shared.values())
    saved = plain.bytes_up - sparse.bytes_up
    assert saved == pytest.approx(4 * parameters * 4 * (1 - 0.2), rel=0.01)  # a value and a place for one of ten
    if name != "fedpac":  # its statistics of classes are no update
        assert plain.bytes_up / sparse.bytes_up == pytest.approx(5, rel=0.01)
    assert sparse.bytes_down == plain.bytes_down


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedavg", "fedrep", "fedpac", "ditto", "pfedme", "scaffold", "fedbn"])
def test_all_entries_are_the_method_itself_and_few_are_not(name):
    runs = {
        keep: train(serve(make(name, more_extensions=(TopK(keep=keep),)), blobs((6, 9, 4)), rate=0.7), 3)
        for keep in (1, 0.1)
    }
    plain = train(serve(make(name), blobs((6, 9, 4)), rate=0.7), 3)
    for set_ in plain.sets:
        torch.testing.assert_close(runs[1].sets[set_], plain.sets[set_], rtol=1e-9, atol=1e-12)
    assert max((runs[0.1].sets["shared"][n] - t).abs().max() for n, t in plain.sets["shared"].items()) > 1e-6


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedavg", "fedrep", "fedpac"])
def test_three_extensions_together_on_all_engines(name):
    given = (Proximal(mu=0.1), Clip(clip_norm=0.05), TopK(keep=0.2))
    runs = [
        train(serve(make(name, more_extensions=given), blobs((6, 9, 4)), **options), 3) for options in ENGINES.values()
    ]
    assert max(difference(run, runs[0]) for run in runs) <= 1e-8
    for left_out in (0, 1):
        fewer = (*given[:left_out], *given[left_out + 1 :])
        assert difference(train(serve(make(name, more_extensions=fewer), blobs((6, 9, 4))), 3), runs[0]) > 1e-9


def test_a_method_that_sends_no_shared_parameters_is_refused_in_one_line():
    for name in ("fedem", "local"):
        with pytest.raises(PerfedError, match="extension 'top-k' compresses ") as error:
            train(serve(make(name, more_extensions=(TopK(),)), blobs()), 1)
        assert "\n" not in str(error.value)


def test_places_outside_of_the_model_name_the_client(monkeypatch):
    class Lying(TopK):
        def outgoing(self, cohort, reply):
            made = super().outgoing(cohort, reply)
            made["shared"]["index"] = made["shared"]["index"] + 10_000
            return made

    server = serve(make("fedavg", more_extensions=(Lying(),)), blobs(), model=network())
    before = {name: t.clone() for name, t in server.state.shared.items()}
    with pytest.raises(PerfedError, match=r"client 'c0': an update has entries .* whose indices are not all in"):
        server.round(1)
    assert all(torch.equal(server.state.shared[name], t) for name, t in before.items())


@pytest.mark.parametrize("more", [(), (TopK(),)], ids=["no extension replaces replies", "one does"])
def test_the_payload_is_kept_only_for_extensions_that_replace_replies(more):
    seen = []

    class Looks(Clip):
        name = "looks"

        def client_update(self, cohort, payload):
            seen.append(set(cohort.delivered))
            return {}

    train(serve(make("fedavg", more_extensions=(Looks(), *more)), blobs()), 1)
    assert seen and all(found == ({"shared", "extensions"} if more else set()) for found in seen)
