"""A site's own model after a run: what evaluation used, for inputs of one's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from engines import blobs, cohort, make, network, network_for, serve

from perfed.data.client import Client, Split
from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.method.method import Method
from perfed.method.registry import method_names
from perfed.methods.build import build_method
from perfed.methods.fedavg import FedAvg
from perfed.model.chain import Model
from perfed.model.presets import linear, mlp
from perfed.run.run import Run
from perfed.training.plan import Plan


def done(name: str, federation: Federation) -> Run:
    method = make(name)
    run = Run(federation, method, network_for(method), name=name, rounds=2, plan=Plan("stacked", threads=1))
    run.execute()
    return run


@pytest.mark.every_method("name")
@pytest.mark.parametrize("name", method_names())
def test_predictions_are_those_that_were_evaluated(name):
    federation = blobs((12, 9, 7), test=9)
    run = done(name, federation)
    measured = run.server.evaluate("test", round_=2)
    for client in federation:
        test = client.test
        if type(run.server.initialiser.method).local_data is not Method.local_data:
            with pytest.raises(PerfedError, match="it has no model for new ones"):
                run.predict(client.id, test.x)
            continue
        found = run.predict(client.id, test.x, test.domain)
        assert float((found.argmax(1) == test.y).float().mean()) == pytest.approx(measured[client.id]["accuracy"])
        try:
            chain, _ = run.model(client.id)
        except PerfedError as error:
            assert "predicts with more than one chain of modules; use predict() of the run" in str(error)
        else:
            torch.testing.assert_close(chain(test.x.float()), found)


def test_predictions_and_metrics_can_be_had_without_tensors_or_files():
    federation = blobs()
    run = Run(federation, make("local"), network(), rounds=2)
    summary = run.execute()
    x = federation.clients[0].test.x
    assert torch.equal(run.predict("c0", x.numpy()), run.predict("c0", x))
    assert run.client_metrics.keys() == set(federation.ids)
    assert summary["settings"] == run.server.initialiser.method.all_settings
    values = [metrics["accuracy"] for metrics in run.client_metrics.values()]
    assert sum(values) / len(values) == pytest.approx(summary["accuracy"]["mean"])


def test_stages_and_placements_that_there_are_not_are_refused():
    with pytest.raises(PerfedError, match=r"'boddy' is no stage and no parameter; stages: embedding, body, head"):
        cohort(make("fedavg"), blobs()).fit(("boddy", "head"), epochs=1)

    class Misspelt(FedAvg):
        default_placement: ClassVar[Any] = {"embedding": "shared", "body": "shraed", "head": "shared"}

    class Lacking(FedAvg):
        default_placement: ClassVar[Any] = {"embedding": "shared", "body": "shared"}

    cases: list[tuple[type[FedAvg], str]] = [
        (Misspelt, r"placement\.body = 'shraed' is not allowed; allowed: personal"),
        (Lacking, "default_placement lacks the stage 'head'"),
    ]
    for cls, says in cases:
        with pytest.raises(PerfedError, match=says):
            serve(cls(), blobs())


def test_the_plain_methods_have_a_chain():
    federation = blobs((9, 8), dims=(4, 3))
    for name in ("local", "hetfedrep", "flic-class", "fedhenn"):
        chain, parameters = done(name, federation).model("c1")
        assert chain(federation.clients[1].test.x.float()).shape == (6, 3)
        assert set(parameters) == set(chain.state_dict())


def test_what_cannot_be_predicted_is_refused():
    run = done("fedavg-multi-head", blobs())
    x = blobs().clients[0].test.x
    with pytest.raises(PerfedError, match="unknown client 'nobody'"):
        run.predict("nobody", x)
    with pytest.raises(PerfedError, match=r"client 'c0' has inputs of shape \(4,\), not \(3,\)"):
        run.predict("c0", x[:, :3])
    with pytest.raises(PerfedError, match="needs the domain of every sample"):
        run.predict("c0", x)


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_head_with_fewer_outputs_than_classes_is_refused(outputs):
    model = Model(body=mlp((), 4), head=linear(outputs))
    with pytest.raises(PerfedError, match=rf"outputs have shape \({outputs},\), but the data have 3 classes"):
        Run(blobs(), make("fedavg"), model, rounds=1)


def test_a_regression_needs_as_many_outputs_as_targets():
    with pytest.raises(PerfedError, match=r"outputs have shape \(3,\), but the data have 1 values"):
        Run(blobs(regression=True), make("fedavg"), network(3), rounds=1)
    pairs = Split(torch.randn(5, 4), torch.randn(5, 2))
    Run(Federation((Client("a", pairs, pairs),), None), make("fedavg"), network(2), rounds=1).execute()


def stage(shape):
    return torch.nn.Linear(shape[0], 3)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (
            torch.nn.Linear(4, 3),
            r"model\.head is a module \(Linear\), .*write lambda shape: .*copy\.deepcopy\(module\)",
        ),
        (torch.nn.Linear, r"model\.head: Linear\(in_features: int, .*missing a required argument: 'out_features'"),
        (lambda: torch.nn.Linear(4, 3), r"model\.head: <lambda>\(\) does not take .*\(too many positional arguments\)"),
        (lambda shape, width: None, r"missing a required argument: 'width'\); a function of the shape of one input"),
        (
            "linear",
            r"model\.head is a str; a function of the shape of one input is needed, such as lambda shape: torch",
        ),
        (3, r"model\.head is a int; a function of the shape"),
        (lambda shape: "text", r"model\.head: its function returned str, not a torch\.nn\.Module"),
        (lambda shape: torch.nn.Linear, r"model\.head: its function returned type, not a torch\.nn\.Module"),
    ],
)
def test_a_stage_that_is_no_function_of_a_shape_is_one_line(head, says):
    with pytest.raises(PerfedError, match=says) as error:
        Run(blobs(), make("local"), Model(head=head), rounds=1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": FedAvg}, "method is the class FedAvg, not a perfed Method; give its name, such as 'fedavg', or"),
        ({"method": None}, "method is a NoneType, not a perfed Method"),
        ({"method": "fedagv"}, "unknown method 'fedagv'; .*did you mean: fedavg"),
        ({"method": "fedavg+srpfl"}, "'fedavg.srpfl' is the method 'fedavg' under the policy 'srpfl'"),
        ({"model": torch.nn.Linear(4, 3)}, r"model is a Linear, not a perfed Model; perfed\.Model\(body=\.\.\., head"),
        ({"model": stage}, "model is a function, not a perfed Model"),
        ({"federation": {"a": 1}}, r"federation is a dict, not a perfed Federation; perfed\.Federation\.from_arrays"),
    ],
)
def test_the_parts_of_a_run_are_checked(changes, says):
    parts: dict[str, Any] = {"federation": blobs(), "method": "local", "model": network()}
    with pytest.raises(PerfedError, match=says):
        Run(**{**parts, **changes}, rounds=1)


def test_a_method_may_be_given_by_its_name_alone():
    given = ("ditto", build_method("ditto"))
    named, built = (Run(blobs(), method, network(), rounds=1, plan=Plan("stacked", threads=1)) for method in given)
    assert named.execute()["metrics"] == built.execute()["metrics"]
    assert named.summary["method"] == "ditto" and built.summary["method"] == "Ditto"


@pytest.mark.parametrize(
    ("method", "same", "says"),
    [
        ("hetfedrep", "local", ["hetfedrep shares parameters of body only, and this model has none: it is 'local'"]),
        (
            "flic-hl",
            "flic-class",
            ["flic-hl shares parameters of body only, and this model has none: it is 'flic-class'"],
        ),
        ("local", "local", []),
        ("flic-class", "flic-class", []),
        (
            "fedper",
            "local",
            ["fedper shares parameters of embedding, body only, and this model has none: it is 'local'"],
        ),
    ],
)
def test_a_method_that_has_nothing_to_share_says_which_one_it_is(method, same, says):
    """The same losses as the method that the note names."""
    runs = []
    for name in (method, same):
        made = make(name, **({"placement": {"embedding": "personal"}} if name == "fedper" else {}))
        run = Run(blobs(), made, Model(embedding=mlp((5,), 4), head=linear(3)), name=name, rounds=2)
        run.execute()
        runs.append(run)
    assert [note for note in runs[0].summary["notes"] if "it is" in note] == says
    losses = [[client["loss"] for client in run.client_metrics.values()] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    with_body = Run(blobs(), make(method), network(), rounds=1)
    assert not [note for note in with_body.notes if "it is" in note]


def test_a_layer_that_cannot_be_stacked_is_named_once():
    """Whatever the number of architectures."""

    def body(shape):
        return torch.nn.Sequential(torch.nn.Linear(shape[0], 5), torch.nn.BatchNorm1d(5))

    model = Model(embedding=body, head=linear(3))
    run = Run(blobs((6, 6, 6), dims=(4, 5, 6)), make("local"), model, rounds=1)
    notes = [note for note in run.execute()["notes"] if "BatchNorm" in note]
    assert notes == ["embedding.1 (BatchNorm1d): one client at a time (batch-norm in training)"]


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = self.first

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Tied, r"model\.body: 'first\.weight' and 'second\.weight' are one parameter \(tied weights\)"),
        (lambda: torch.nn.LazyLinear(4), r"model\.body has lazy layers; give their sizes"),
    ],
)
def test_modules_that_cannot_be_kept_per_client_are_refused(module, says):
    model = Model(body=lambda shape: module(), head=linear(3))
    with pytest.raises(PerfedError, match=says):
        Run(blobs(), make("fedavg"), model, rounds=1)


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "local"])
@pytest.mark.parametrize("engine", ["stacked", "sequential"])
def test_what_does_not_require_gradients_stays_as_it_was_built(name, engine):
    def body(shape):
        layers = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 5))
        torch.nn.init.constant_(layers[0].weight, 0.25)
        layers[0].requires_grad_(False)
        return layers

    run = Run(blobs(), make(name), Model(body=body, head=linear(3)), rounds=2, plan=Plan(engine, threads=1))
    run.execute()
    _, parameters = run.model("c0")
    assert (parameters["body.0.weight"] == 0.25).all()
    assert "body.0.weight" not in run.server.state.shared
    assert ("body.2.weight" in run.server.state.shared) == (name != "local")


def test_a_device_that_is_not_there_is_one_line():
    with pytest.raises(PerfedError, match="device = 'gpu': unknown device; allowed: cpu"):
        Run(blobs(), make("local"), network(), rounds=1, device="gpu")


def test_the_fingerprint_is_of_clients_sizes_shapes_and_targets():
    plain = blobs()
    first, *rest = plain.clients
    flipped = replace(first, train=replace(first.train, y=first.train.y.flip(0)))
    shorter = replace(first, train=first.train.take(torch.arange(len(first.train) - 1)))
    renamed = replace(first, id="z")
    marks = {replace(plain, clients=(other, *rest)).fingerprint for other in (first, flipped, shorter, renamed)}
    assert len(marks) == 4 and blobs().fingerprint == plain.fingerprint
