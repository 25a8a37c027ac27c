"""Runs with dishonest clients, and what robust aggregation does not go with."""

from __future__ import annotations

import json
from typing import ClassVar

import numpy as np
import pytest
import torch
from engines import ENGINES, blobs, difference, make, serve, train
from robust import SignFlip

from perfed import Method, Model, Reply, build_method, linear
from perfed.aggregation import Aggregation
from perfed.data.federation import Federation
from perfed.engine.secure_aggregation import SecureAggregation
from perfed.errors import ClientsDiverged, PerfedError
from perfed.experiment.config import validate
from perfed.experiment.start import resume, start
from perfed.maths.aggregate import weighted_mean
from perfed.method.extension import Extension
from perfed.methods.fedavg import FedAvg
from perfed.privacy.client import ClientPrivacy
from perfed.privacy.sample import SamplePrivacy
from perfed.testing.federations import make_named_columns
from perfed.testing.runs import build_network_for

KINDS = {
    "mean": Aggregation(),
    "median": Aggregation(kind="median"),
    "trimmed-mean": Aggregation(kind="trimmed-mean", trim=0.3),
    "norm-bound": Aggregation(kind="norm-bound", bound=0.1),
}
ROBUST = [kind for kind in KINDS if kind != "mean"]
TABLE = {
    "method": "fedavg",
    "rounds": 4,
    "data": {"name": "digits", "clients": 6},
    "model": {"head": "linear"},
    "training": {"optimizer": "sgd", "lr": 0.1},
}


def alike(clients: int = 10) -> Federation:
    return blobs((20,) * clients, labels=[[0, 1, 2]] * clients, test=20)


def accuracy(method: str, kind: str, dishonest: tuple[str, ...], **options) -> float:
    built = make(method, lr=0.1, optimizer="sgd", more_extensions=(SignFlip(clients=dishonest),))
    server = serve(built, alike(), aggregation=KINDS[kind], **options)
    try:
        metrics = train(server, 8).evaluate("test")
    except ClientsDiverged:
        return 0.0
    return float(np.mean([values["accuracy"] for client, values in metrics.items() if client not in dishonest]))


@pytest.mark.long
@pytest.mark.parametrize("kind", ROBUST)
@pytest.mark.parametrize("method", ["fedavg", "fedrep"])
def test_dishonest_clients_ruin_the_mean_and_not_the_robust_kinds(method, kind):
    liars = ("c2", "c5", "c7")
    honest, ruined = accuracy(method, "mean", ()), accuracy(method, "mean", liars)
    assert ruined < honest - 0.45
    assert accuracy(method, kind, liars) > max(honest - 0.25, ruined + 0.25)


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_is_the_estimate_over_the_replies_in_every_engine(engine):
    federation = blobs((9, 4, 6, 3, 5))
    sent = {}

    class Recorder(FedAvg):
        def round(self, server, clients):
            before = server.shared
            reply = clients.train(self.train, shared=before)
            sent.update(before=before, replies=reply.shared, weights=reply.num_samples)
            server.shared = clients.mean(reply.shared, reply.num_samples, current=before)

        needs_mean: ClassVar[str] = ""

    for kind, aggregation in KINDS.items():
        method = Recorder(lr=0.1)
        server = train(serve(method, federation, aggregation=aggregation, **ENGINES[engine]), 1)
        weights = sent["weights"].double().numpy()
        change = {n: (x - sent["before"][n]).flatten(1).numpy() for n, x in sent["replies"].items()}
        norms = np.sqrt(sum((c**2).sum(1) for c in change.values()))
        for name, x in sent["replies"].items():
            rows = x.flatten(1).numpy()
            if kind == "norm-bound":
                short = change[name] * np.minimum(1, 0.1 / norms)[:, None]
                expected = sent["before"][name].flatten().numpy() + np.average(short, axis=0, weights=weights)
            elif kind == "mean":
                expected = np.average(rows, axis=0, weights=weights)
            else:
                repeated = np.sort(np.repeat(rows, weights.astype(int), axis=0), axis=0)
                total = len(repeated)
                if kind == "median":
                    expected = np.median(repeated, axis=0)
                else:
                    upto = np.arange(total + 1.0).clip(0.3 * total, 0.7 * total)
                    expected = np.average(repeated, axis=0, weights=np.diff(upto))
            np.testing.assert_allclose(server.state.shared[name].flatten(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.long
def test_an_interrupted_run_resumes_with_the_same_bits(tmp_path):
    experiment = validate({**TABLE, "aggregation": {"kind": "trimmed-mean", "trim": 0.2}})
    whole = start(experiment)
    whole.execute()

    class Stop(Exception):
        pass

    def stop(number, *_):
        if number == 2:
            raise Stop

    with pytest.raises(Stop):
        start(experiment, out=tmp_path / "run").execute(stop)
    text = (tmp_path / "run/config.toml").read_text()
    assert '[aggregation]\nkind = "trimmed-mean"\ntrim = 0.2\n' in text
    resumed = resume(tmp_path / "run")
    resumed.execute()
    for name, tensor in whole.server.sets["shared"].items():
        assert torch.equal(tensor, resumed.server.sets["shared"][name])


@pytest.mark.long
def test_a_run_without_the_table_leaves_what_it_always_did(tmp_path):
    for number, table in enumerate(({}, {"aggregation": {"kind": "mean"}})):
        start(validate({**TABLE, **table}), out=tmp_path / str(number)).execute()
    texts = [(tmp_path / str(number) / "config.toml").read_text() for number in (0, 1)]
    assert texts[0] == texts[1] and "aggregation" not in texts[0]
    summaries = [json.loads((tmp_path / str(number) / "summary.json").read_text()) for number in (0, 1)]
    assert summaries[0]["metrics"] == summaries[1]["metrics"]


def refusal(*arguments, **options) -> str:
    with pytest.raises(PerfedError) as caught:
        serve(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ROBUST)
def test_what_a_robust_kind_does_not_go_with_is_refused_in_one_line(kind):
    aggregation, start_ = KINDS[kind], f"aggregation.kind = '{kind}' cannot replace the mean here: "
    fedavg = build_method("fedavg")
    masked = refusal(fedavg, blobs(), aggregation=aggregation, secure=SecureAggregation())
    assert masked.startswith(start_) and "single clients" in masked
    private = fedavg.model_copy(update={"extensions": (ClientPrivacy(entries=("shared", "num_samples")),)})
    assert "privacy.unit = 'client'" in refusal(private, blobs(), aggregation=aggregation)
    lacking = make_named_columns()
    assert "some lack a column" in refusal(fedavg, lacking, aggregation=aggregation)
    for quiet in (Aggregation(), None):
        serve(fedavg, lacking, aggregation=quiet)


@pytest.mark.parametrize("kind", ROBUST)
def test_privacy_of_rows_goes_with_every_kind(kind):
    rows = build_method("fedavg").model_copy(
        update={"extensions": (SamplePrivacy(entries=("shared", "num_samples"), noise=1.0),)}
    )
    train(serve(rows, blobs(), aggregation=KINDS[kind]), 1)  # each reply is private before it is combined


def test_experiments_refuse_private_and_masked_clients():
    private = {"epsilon": 8.0, "delta": 1e-3, "unit": "client"}
    for table, said in (
        ({"privacy": private}, "privacy.unit = 'client'"),
        ({"secure_aggregation": {}}, "single clients"),
    ):
        with pytest.raises(PerfedError, match=said):
            start(validate({**TABLE, **table, "aggregation": {"kind": "median"}}))
        start(validate({**TABLE, **table}))


class Plain(Method):
    def round(self, server, clients):
        reply = clients.train(self.train, shared=server.shared)
        server.shared = weighted_mean(reply.shared, reply.num_samples)

    def train(self, cohort, shared):
        cohort.load(shared)
        cohort.fit(("body", "head"), epochs=1)
        return Reply(shared=cohort.shared(), num_samples=cohort.num_samples)


class OtherRound(FedAvg):
    def round(self, server, clients):
        Plain.round(self, server, clients)


class OtherTraining(FedAvg):
    def train(self, cohort, shared):
        return super().train(cohort, shared)


def test_a_method_that_does_not_declare_what_it_needs_has_the_mean_alone():
    median = KINDS["median"]
    for method in (Plain(), OtherRound()):
        assert "does not declare" in refusal(method, blobs(), aggregation=median, model=build_network_for(method))
        serve(method, blobs())
    train(serve(OtherTraining(), blobs(), aggregation=median), 1)


def test_class_means_are_robust_too():
    federation = alike(7)

    class WrongMeans(Extension):
        name: ClassVar[str] = "wrong-means"

        def outgoing(self, cohort, reply):
            means = reply["extensions"]["prototypes"]["means"].clone()
            means[[client in ("c1", "c4") for client in cohort.ids]] = 1e6
            inner = {**reply["extensions"]["prototypes"], "means": means}
            return Reply({**reply, "extensions": {**reply["extensions"], "prototypes": inner}})

    sizes = {}
    for kind in ("mean", "median", "trimmed-mean"):
        method = make("fedproto", more_extensions=(WrongMeans(),))
        server = train(serve(method, federation, aggregation=KINDS[kind]), 1)
        sizes[kind] = float(server.state.centroids["mean"].abs().max())
    assert sizes["mean"] > 1e5 and sizes["median"] < 100 and sizes["trimmed-mean"] < 100


def test_feddars_setting_of_the_same_name_keeps_its_key():
    assert build_method("feddar-sa", {"aggregation": "weighted"}).aggregation == "weighted"
    from perfed.experiment.overrides import override

    table = override({**TABLE}, ["aggregation=weighted"], ["fedavg", "feddar-sa"])
    assert table["methods"]["feddar-sa"] == {"aggregation": "weighted"} and "aggregation" not in table
    table = override({**TABLE}, ["aggregation.kind=Median"], ["feddar-sa"])
    assert table["aggregation"] == {"kind": "median"}
    table = override(
        {**TABLE, "aggregation": {"kind": "norm-bound", "bound": 2.0}}, ["aggregation={kind='median'}"], ["fedavg"]
    )
    assert table["aggregation"] == {"kind": "median"}


@pytest.mark.parametrize("kind", ROBUST)
def test_where_nothing_is_shared_every_kind_gives_what_the_mean_gives(kind):
    runs = [
        train(serve(make("fedper"), blobs(), model=Model(head=linear(3)), aggregation=KINDS[name]), 2)
        for name in ("mean", kind)
    ]
    assert difference(*runs) == 0
