"""FedPAC: what is trained when, what the server combines, and what each switch changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engines import blobs, cohort, difference, make, network, network_for, serve, train

from perfed.data.federation import Federation
from perfed.engine.gap import generalisation_gap
from perfed.errors import PerfedError
from perfed.method.method import Method
from perfed.methods.extensions.prototypes import Prototypes
from perfed.methods.fedpac import combination
from perfed.methods.fedpac.combination import combination_weights
from perfed.model.chain import Model
from perfed.model.presets import hidden_layer, mlp
from perfed.participation.settings import Participation
from perfed.report.snapshots import load_combination
from perfed.run.directory import RunDirectory
from perfed.run.run import Run
from perfed.run.settings import Evaluation, Snapshots
from perfed.training.plan import Plan

GAP = "generalisation-gap"
GAP_CLASSES = {"labels": [[0, 1, 2], [0, 1], [1, 2]], "num_classes": 3}
GROUPS = {"labels": [[0, 1], [0, 1], [2, 3], [2, 3]], "num_classes": 4}


def fedpac(alignment: float = 1.0, **settings) -> Method:
    return make("fedpac", **settings).model_copy(update={"extensions": (Prototypes(alignment=alignment),)})


def heads(server):
    """The head that each client's own model has, as evaluated."""
    (group,) = server.engine.cohorts(server.engine.federation.ids, server.initialiser.method.download(server.state))
    return dict(zip(group.ids, group.model["head.weight"], strict=True)), group


def test_one_round_is_the_algorithm_box():
    """Statistics with the received body, head then body, and phi_i = sum_j alpha_ij phi_j."""
    settings = {"optimizer": "sgd", "lr": 0.05, "head_lr": 0.2, "local_epochs": 2}
    federation = blobs((12, 8, 5), test=2)
    server = serve(fedpac(**settings), federation)
    before = dict(server.state.shared)
    method = server.initialiser.method
    group = cohort(method, federation)
    group.load({name: t.expand(3, *t.shape).clone() for name, t in before.items()})
    features = group.representation().split([12, 8, 5])
    h = torch.zeros(3, 3, 5, dtype=torch.float64)
    v = torch.zeros(3, dtype=torch.float64)
    for i, (f, client) in enumerate(zip(features, group.clients, strict=True)):
        y, n = client.train.y, len(client.train)
        for c in y.unique().tolist():
            share = (y == c).sum() / n
            h[i, c] = share * f[y == c].mean(0)
            v[i] += share * f[y == c].square().sum(1).mean() - h[i, c].square().sum()
    alpha, _ = combination_weights(h, v, torch.tensor([12.0, 8.0, 5.0]))
    # the same local work, by hand
    group.fit("head", epochs=1)
    assert all(torch.equal(group.model[name], group.received[name]) for name in before)
    trained = group.model["head.weight"].clone()
    group.fit(("embedding", "body"), epochs=2)
    assert torch.equal(group.model["head.weight"], trained)
    expected = torch.einsum("ij,jkl->ikl", alpha, trained)
    server.prepare()
    server.round(1)
    found, _ = heads(server)
    for row, client in enumerate(group.ids):
        torch.testing.assert_close(found[client], expected[row])
    shares = torch.tensor([12.0, 8.0, 5.0], dtype=torch.float64) / 25
    for name in before:
        mean = torch.tensordot(shares, group.model[name], 1)
        torch.testing.assert_close(server.state.shared[name], mean)
    chain, sums = group.chain, []
    for row, client in enumerate(group.clients):  # features of the trained body, by plain modules
        chain.load_state_dict({name: t[row] for name, t in group.model.items()})
        z = chain.body(chain.embedding(client.train.x)).detach()
        sums.append(z[client.train.y == 0].sum(0))
    centroid = torch.stack(sums).sum(0)
    torch.testing.assert_close(server.state.centroids["mean"][0], centroid / group.class_counts[:, 0].sum())


def test_the_head_has_its_own_learning_rate():
    moved = []
    for head_lr in (0.0, 0.5):
        server = serve(fedpac(optimizer="sgd", head_lr=head_lr, collaboration=False), blobs())
        start = cohort(server.initialiser.method, blobs()).model["head.weight"].clone()
        train(server, 1)
        _, group = heads(server)
        moved.append(float((group.model["head.weight"] - start).norm()))
    assert moved[0] == 0 and moved[1] > 0.1


@pytest.mark.long
def test_alignment_starts_in_the_second_round_and_pulls_features_to_the_common_means():
    first = [train(serve(fedpac(alignment), blobs()), 1) for alignment in (0.0, 5.0)]
    assert difference(*first) == 0
    gaps = []
    for alignment in (0.0, 20.0):
        server = train(serve(fedpac(alignment, lr=0.02), blobs((20, 20, 20))), 10)
        _, group = heads(server)
        features, y = group.representation(), group.samples().y
        means = server.state.centroids["mean"]
        gaps.append(float((features - means[y]).square().sum() / means[y].square().sum()))
    assert gaps[1] < 0.5 * gaps[0]


@pytest.mark.long
def test_the_switches_give_the_four_variants():
    """None is FedRep with one head epoch first; each switch alone changes the result."""
    data = blobs((12, 9, 7), labels=[[0, 1], [1, 2], [0, 2]])
    none = train(serve(fedpac(0.0, collaboration=False, head_lr=1e-2), data), 3)
    fedrep = train(serve(make("fedrep", local_epochs=1, body_epochs=2), data), 3)
    for name, tensor in fedrep.state.shared.items():
        torch.testing.assert_close(none.state.shared[name], tensor)
    others = [
        train(serve(fedpac(a, collaboration=c, head_lr=1e-2), data), 3) for a, c in ((1, False), (0, True), (1, True))
    ]
    found = [heads(server)[1].model["head.weight"] for server in (none, *others)]
    for i in range(4):
        for j in range(i):
            assert not torch.allclose(found[i], found[j], atol=1e-6)


def test_clients_of_disjoint_label_groups_do_not_share_heads():
    server = serve(fedpac(), blobs((40, 40, 40, 40), **GROUPS), model=network(4))
    server.prepare()
    weights = server.round(1).arrays["combination"]["weights"]
    assert weights[:2, :2].sum() > 1.9 and weights[2:, 2:].sum() > 1.9
    assert weights[0, 1] > 0.2 and weights[3, 2] > 0.2  # and within a group they do


def test_without_cooperation_a_clients_head_never_travels():
    size = lambda server: sum(t.numel() for t in server.state.shared.values()) * 8  # noqa: E731
    server = serve(fedpac(collaboration=False), blobs())
    server.prepare()
    record = server.round(1)
    centroids = 3 * 5 * 8
    assert record.bytes_down == 3 * (size(server) + centroids + 3)
    assert record.bytes_up == 3 * (size(server) + 8 + centroids + 3 * 8)
    assert "heads" not in server.state.tree()


def test_clients_that_were_not_chosen_keep_their_head_and_take_the_newest_body():
    server = train(serve(fedpac(), blobs((8, 7, 6, 5)), rate=0.5), 2)
    before, _ = heads(server)
    record = server.round(3)
    after, group = heads(server)
    assert len(record.participants) == 2
    for client in group.ids:
        assert torch.equal(before[client], after[client]) == (client not in record.participants)
    body = server.state.shared["body.0.weight"]
    assert all(torch.equal(row, body) for row in group.model["body.0.weight"])


def test_a_client_that_was_never_used_is_evaluated_with_the_head_it_fitted():
    """The server has no combined head for it; the initial one in its table must not come in between."""
    federation = blobs((8, 7, 6, 5))
    policy = Participation(rate=0.25, last_round="sampled", fit_unused=True)
    server = train(serve(fedpac(), federation, participation=policy), 1)
    (used,) = [i for i in federation.ids if server.state.combined[i]["combined"]]
    unused = [i for i in federation.ids if i != used]
    plain, fitted = server.evaluate("train"), server.evaluate("train", never_used=unused)
    assert fitted[used] == pytest.approx(plain[used], rel=1e-10)  # in a cohort of its own
    assert all(fitted[i]["loss"] < plain[i]["loss"] for i in unused)
    server.settle(unused, 1)
    settled = server.evaluate("train")
    assert all(settled[i]["loss"] < plain[i]["loss"] for i in unused)


@pytest.mark.long
def test_what_of_a_head_is_not_personal_or_not_trained_is_not_combined():
    """Batch-norm's statistics stay with the client, and a shared bias is the server's."""
    head = mlp((4,), 3, batch_norm=True)
    train(serve(fedpac(), blobs((9, 8, 7, 6)), model=Model(body=hidden_layer(5), head=head), rate=0.5), 3)
    server = train(serve(fedpac(placement={"head.bias": "shared"}), blobs((9, 8, 7, 6)), rate=0.5), 3)
    _, group = heads(server)
    assert all(torch.equal(row, server.state.shared["head.bias"]) for row in group.model["head.bias"])
    rows = group.model["head.weight"]
    assert not torch.allclose(rows[0], rows[1])


def test_the_order_of_the_clients_changes_nothing():
    arrays = {c.id: c for c in blobs((9, 7, 5))}
    renamed = {"c0": "z", "c1": "a", "c2": "m"}
    runs = []
    for names in ({c: c for c in arrays}, renamed):
        federation = Federation.from_arrays(
            {
                names[c]: {
                    "x_train": client.train.x,
                    "y_train": client.train.y,
                    "x_test": client.test.x,
                    "y_test": client.test.y,
                }
                for c, client in arrays.items()
            },
            num_classes=3,
        )
        method = fedpac(0.0, batch_size=100, optimizer="sgd")  # full batches: no shuffles keyed by the name
        runs.append(heads(train(serve(method, federation), 2))[0])
    for client, name in renamed.items():
        torch.testing.assert_close(runs[0][client], runs[1][name], rtol=1e-9, atol=1e-11)


def test_with_equal_features_covariances_do_not_matter_and_otherwise_they_do():
    plain = train(serve(fedpac(), blobs((30, 20, 10))), 1)
    general = train(serve(fedpac(inner_product="covariance"), blobs((30, 20, 10))), 1)
    first, second = heads(plain)[0], heads(general)[0]
    assert any(not torch.allclose(first[c], second[c], atol=1e-8) for c in first)


def test_a_problem_that_does_not_solve_leaves_the_client_its_own_head_and_is_counted(monkeypatch):
    real, calls = combination.simplex_qp, []

    def broken(matrix, linear=None):
        calls.append(1)
        if len(calls) == 2:
            raise combination.QPFailed("no")
        return real(matrix, linear)

    monkeypatch.setattr(combination, "simplex_qp", broken)
    server = serve(fedpac(), blobs((9, 8, 7)))
    server.prepare()
    record = server.round(1)
    assert record.counts == {"unsolved_combinations": ["c1"]}
    own = server.engine.states["c1"]["model"]["head.weight"]
    torch.testing.assert_close(heads(server)[0]["c1"], own)


def test_a_run_says_whose_problems_did_not_solve(monkeypatch):
    def broken(matrix, linear=None):
        raise combination.QPFailed("no")

    monkeypatch.setattr(combination, "simplex_qp", broken)
    method = fedpac()
    run = Run(blobs((9, 8)), method, network_for(method), rounds=2, plan=Plan("stacked", threads=1))
    summary = run.execute()
    assert [line["counts"] for line in run.history] == [{"unsolved_combinations": ["c0", "c1"]}] * 2
    assert "unsolved combinations: 4 (clients in rounds.jsonl)" in summary["notes"]
    assert summary["counts"] == {"unsolved_combinations": 4}


@pytest.mark.long
def test_weights_are_kept_of_the_rounds_that_are_asked_for(tmp_path):
    found = {}
    for name, every, shown in (("all", 1, ()), ("chosen", 2, (1, 3)), ("evaluated", 2, ())):
        method, directory = fedpac(), RunDirectory.create(tmp_path / name)
        kept = {
            "evaluation": Evaluation(every=every),
            "snapshots": Snapshots(shown=shown),
            "plan": Plan("stacked", threads=1),
        }
        Run(blobs((9, 8)), method, network_for(method), rounds=3, directory=directory, **kept).execute()
        files = sorted((tmp_path / name / "combination").glob("*.npz"))
        found[name] = {int(file.stem[-4:]): load_combination(file).weights.tolist() for file in files}
        assert len(list((tmp_path / name / "predictions").glob("*.npz"))) == 1  # of the last round, as always
    assert list(found["all"]) == [1, 2, 3] and list(found["evaluated"]) == [2, 3]
    assert found["chosen"] == {number: found["all"][number] for number in (1, 3)}


def test_the_generalisation_gap_is_that_of_a_loop_over_samples():
    """Eq. 14 with its sign turned, written out: every sample against the mean feature of all samples of its class."""
    federation, method = blobs((9, 5, 12), **GAP_CLASSES), fedpac()
    run = Run(federation, method, network_for(method), rounds=2, evaluation=Evaluation(every=1, metrics=(GAP,)))
    summary = run.execute()
    features, heads, classes = {}, {}, federation.num_classes
    for client in federation:
        modules = dict(run.model(client.id)[0].named_children())
        heads[client.id] = modules["head"].weight.detach()
        z = client.train.x.float()
        for stage in ("embedding", "body"):
            z = modules[stage](z) if stage in modules else z
        features[client.id] = z.detach()
    total = {}
    for client in federation:
        for z, y in zip(features[client.id], client.train.y.tolist(), strict=True):
            total.setdefault(y, []).append(z)
    centroids = {y: torch.stack(rows).mean(0) for y, rows in total.items()}
    gaps = []
    for client in federation:
        rows = zip(features[client.id], client.train.y.tolist(), strict=True)
        gaps.append(sum(2 * (z - centroids[y]) @ heads[client.id][y] / classes for z, y in rows) / len(client.train))
    right = [float(gap) for gap in gaps]
    assert [run.client_metrics[client.id][GAP] for client in federation] == pytest.approx(right, rel=1e-4, abs=1e-7)
    assert summary["metrics"][GAP]["mean"] == pytest.approx(sum(right) / 3, rel=1e-4, abs=1e-7)
    assert all(GAP in line["metrics"] for line in run.history) and max(map(abs, right)) > 1e-4


def test_the_gap_is_what_the_true_loss_is_above_the_one_on_own_samples():
    """Eq. 12 summed over all inputs and classes; the truth is what two clients of equal labels hold together.

    What does not depend on the head goes when two heads are compared.
    """
    rng, inputs, classes, dim = np.random.default_rng(0), 6, 3, 4
    f, own = rng.normal(size=(inputs, dim)), rng.integers(1, 9, (2, inputs, classes)).astype(float)
    own[1] *= own[0].sum(0) / own[1].sum(0)  # as many samples of each class
    empirical, true = own[0] / own[0].sum(), own.sum(0) / own.sum()
    marginal = true.sum(1, keepdims=True)

    def loss(joint, head):
        return float(((joint - marginal * (1 + f @ head.T) / classes) ** 2 / marginal).sum())

    heads = rng.normal(size=(2, classes, dim))
    above = [loss(true, head) - loss(empirical, head) for head in heads]
    counts = torch.from_numpy(own.sum(1))
    means = torch.from_numpy(np.einsum("mxc,xd->mcd", own, f)) / counts[:, :, None]
    gaps = [generalisation_gap(means, counts, torch.from_numpy(np.stack([head, head])))[0] for head in heads]
    assert float(gaps[0] - gaps[1]) == pytest.approx(above[0] - above[1], rel=1e-9)


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("fedem", {}, "is for methods that predict with one linear head"),
        ("fedpac", {"when": "after"}, "needs the models of rounds: when = 'before'"),
    ],
)
def test_models_without_a_linear_head_have_no_such_gap(name, settings, problem):
    method = make(name)
    with pytest.raises(PerfedError, match=problem):
        Run(blobs((9, 8)), method, network_for(method), rounds=1, evaluation=Evaluation(metrics=(GAP,), **settings))


def test_regression_is_refused():
    with pytest.raises(PerfedError, match="needs class labels"):
        serve(make("fedpac"), blobs((5, 4), regression=True))
