"""Metrics per domain: over the samples of all clients, per client, and where a run leaves them."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from engines import blobs, cohort, make, network, serve, train
from sklearn.metrics import roc_auc_score

from perfed.cli.terminal import print_summary
from perfed.data.federation import Federation
from perfed.engine.evaluate import Outputs, compute_domain_metrics, outputs_of, summarise, with_extremes
from perfed.engine.metrics import Scoring
from perfed.errors import PerfedError
from perfed.report import load_runs, write_report
from perfed.report.tables import domain_tables
from perfed.run.directory import RunDirectory
from perfed.run.run import Run
from perfed.run.totals import RunTotals
from perfed.training.plan import Plan

CLIENT = np.array(["a", "a", "a", "b", "b", "b", "b"])
DOMAIN = np.array([0, 1, 1, 0, 0, 1, 1])
SCORE = np.array([0.3, -1.0, 2.0, -0.2, 1.0, 0.5, -0.5])
Y = np.array([1, 0, 1, 1, 0, 0, 1])


def federation(num_classes: int | None, names: tuple[str, ...] | None) -> Federation:
    found = blobs((4, 4), num_classes=2, regression=num_classes is None)
    return replace(found, domain_names=names)


def test_accuracy_and_auc_of_a_domain_pool_the_samples_of_all_clients():
    outputs = Outputs(CLIENT, DOMAIN, Y, np.stack([-SCORE, SCORE], 1))
    domains, clients = compute_domain_metrics([outputs], federation(2, ("left", "right")))
    domains = with_extremes(domains)
    for m, name in enumerate(("left", "right")):
        rows = m == DOMAIN
        assert domains["accuracy"][name] == pytest.approx(((SCORE[rows] > 0) == Y[rows]).mean())
        assert domains["auc"][name] == pytest.approx(roc_auc_score(Y[rows], SCORE[rows]))
    both = [domains["auc"][name] for name in ("left", "right")]
    assert domains["auc"]["mean"] == pytest.approx(np.mean(both))
    assert domains["auc"]["min"] == min(both) and domains["auc"]["max"] == max(both)
    assert clients["a"]["accuracy_right"] == 1.0 and "auc_left" not in clients["a"]  # one sample, one class
    assert clients["b"]["accuracy_left"] == 0.0


def test_regression_has_mean_squared_errors():
    outputs = Outputs(CLIENT, DOMAIN, Y.astype(float), SCORE[:, None])
    domains = with_extremes(compute_domain_metrics([outputs], federation(None, None))[0])
    assert domains["mse"]["1"] == pytest.approx(np.square(SCORE - Y)[DOMAIN == 1].mean())


@pytest.mark.parametrize("name", ["fedavg", "feddar-sa"])
def test_a_run_writes_them_and_they_add_up_to_the_clients_accuracy(tmp_path, name):
    data = replace(blobs((9, 8, 7), test=(5, 6, 7)), domain_names=("minus", "plus"))
    directory = RunDirectory.create(tmp_path / "run")
    run = Run(data, make(name), network(), rounds=2, dtype=torch.float64, directory=directory)
    summary = run.execute()
    assert set(summary["domains"]["accuracy"]) == {"minus", "plus", "mean", "min", "max"}
    counts = torch.bincount(torch.cat([c.test.domain for c in data])).double().numpy()
    pooled = np.array([summary["domains"]["accuracy"][m] for m in ("minus", "plus")])
    with (tmp_path / "run" / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    right = sum(float(row["accuracy_before"]) * int(row["n_test"]) for row in rows)
    assert (pooled * counts).sum() == pytest.approx(right)
    assert {"accuracy_minus", "accuracy_plus"} <= set(rows[0])
    last = json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[-1])
    assert last["domains"] == summary["domains"]


def test_without_domains_there_are_none():
    plain = tuple(replace(c, train=replace(c.train, domain=None), test=None) for c in blobs())
    with_test = tuple(replace(c, test=c.train) for c in plain)
    run = Run(Federation(with_test, 3), make("fedavg"), network(), rounds=1)
    assert "domains" not in run.execute()


def test_metrics_per_domain_need_domains():
    plain = tuple(replace(c, train=replace(c.train, domain=None), test=replace(c.test, domain=None)) for c in blobs())
    group = cohort(make("fedavg"), Federation(plain, 3))
    found = outputs_of(group, "test", None, Scoring())
    with pytest.raises(PerfedError, match=r"metrics per domain need domains; client 'c0': samples without"):
        compute_domain_metrics([found], Federation(plain, 3))


def test_auc_of_each_client_that_holds_both_classes():
    server = train(serve(make("fedavg"), blobs((9, 8, 7), num_classes=2, labels=[[0, 1], [1]], test=12)), 1)
    metrics = server.evaluate("test")
    chain = network(2).build((4,)).double()
    chain.load_state_dict(server.state.shared)
    for client in server.engine.federation:
        logits = chain(client.test.x).detach()
        if len(client.test.y.unique()) == 2:
            expected = roc_auc_score(client.test.y.numpy(), (logits[:, 1] - logits[:, 0]).numpy())
            assert metrics[client.id]["auc"] == pytest.approx(expected)
        else:
            assert "auc" not in metrics[client.id]
    assert ["auc" in metrics[client] for client in ("c0", "c1", "c2")] == [True, False, True]
    mean = summarise(metrics)["auc"]["mean"]
    assert mean == pytest.approx((metrics["c0"]["auc"] + metrics["c2"]["auc"]) / 2)


def test_extremes_over_domains_are_taken_after_the_mean_over_the_last_rounds():
    tally = RunTotals()
    tally.add_evaluation({}, {"accuracy": {"a": 0.9, "b": 0.1}}, 2)
    tally.add_evaluation({}, {"accuracy": {"a": 0.6, "b": 0.4}}, 2)
    tally.add_evaluation({}, {"accuracy": {"a": 0.2, "b": 0.8}}, 2)
    found = with_extremes(tally.domains)["accuracy"]
    assert found == pytest.approx({"a": 0.4, "b": 0.6, "mean": 0.5, "min": 0.4, "max": 0.6})
    assert RunTotals.from_dict(tally.to_dict()) == tally
    with pytest.raises(PerfedError, match="written by another version of perfed"):
        RunTotals.from_dict({"rounds": 3})


# A domain that is only in test data -----------------------------------------------------------------------------


def only_tested(names=("plus", "minus", "new")) -> Federation:
    """Nobody trains on domain 2 and two clients are tested on it; c1 trains on domain 0 alone, others on 0 and 1."""
    clients = []
    for row, client in enumerate(blobs((20, 12, 16), test=30)):
        train_ids, test_ids = (
            torch.arange(len(client.train)) % 2 * (row != 1),
            torch.arange(30) % (2 if row == 2 else 3),
        )
        parts = replace(client.train, domain=train_ids), replace(client.test, domain=test_ids)
        clients.append(replace(client, train=parts[0], test=parts[1]))
    return replace(blobs((20, 12, 16)), clients=tuple(clients), domain_names=names)


def by_hand(run, data, heads) -> dict[str, float]:
    """Accuracy of each domain with the server's body and ``heads(domain)``, over all clients' test samples."""
    shared, chain = run.server.state.shared, network().build((4,)).double()
    right: dict[int, list[bool]] = {}
    for client in data:
        for x, y, m in zip(client.test.x.double(), client.test.y, client.test.domain.tolist(), strict=True):
            own = {f"head.{n}": heads(shared[f"head.{n}"], m) for n in ("weight", "bias")}
            out = torch.func.functional_call(chain, {**shared, **own}, (x[None],))
            right.setdefault(m, []).append(bool(out.argmax() == y))
    return {data.domain_name(m): float(np.mean(values)) for m, values in sorted(right.items())}


@pytest.mark.long
@pytest.mark.parametrize("engine", ["stacked", "sequential"])
@pytest.mark.parametrize("name", ["feddar-sa", "feddar-wa", "fedavg-multi-head"])
def test_a_domain_that_nobody_trains_on_gets_the_mean_of_the_trained_heads(tmp_path, engine, name):
    data, directory = only_tested(), RunDirectory.create(tmp_path / "run")
    options = {"rounds": 6, "dtype": torch.float64, "directory": directory, "plan": Plan(engine)}
    run = Run(data, make(name, lr=0.03), network(), **options)
    drawn = run.server.state.shared["head.weight"][2].clone()
    summary = run.execute()
    expected = by_hand(run, data, lambda t, m: t[:2].mean(0) if m == 2 else t[m])
    found = summary["domains"]["accuracy"]
    assert {domain: found[domain] for domain in expected} == pytest.approx(expected)
    assert found["min"] == pytest.approx(min(expected.values()))
    assert torch.equal(run.server.state.shared["head.weight"][2], drawn)
    # outputs for new inputs are the same
    client, shared = data.clients[0], run.server.state.shared
    x, domain = client.test.x, client.test.domain
    own = {n: t[:2].mean(0) if n.startswith("head") else t for n, t in shared.items()}
    logits = torch.func.functional_call(network().build((4,)).double(), own, (x.double(),))
    torch.testing.assert_close(run.predict("c0", x, domain)[domain == 2], logits[domain == 2].detach())
    # and the run says so
    note = (
        "domains that nobody trains on, only in test data: new; outputs there are the means of those with the other "
        "domains' parameters"
    )
    assert note in summary["notes"] and summary["untrained_domains"] == ["new"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["untrained_domains"] == ["new"]


@pytest.mark.long
def test_tables_mark_a_domain_that_nobody_trains_on(tmp_path, capsys):
    data, runs = only_tested(), []
    for name in ("feddar-wa", "fedavg"):
        directory = RunDirectory.create(tmp_path / name)
        directory.write_config(f'method = "{name}"\nseed = 0\n')
        run = Run(data, make(name), network(), name=name, rounds=1, directory=directory)
        run.execute()
        runs.append(run)
    found = load_runs([tmp_path / name for name in ("feddar-wa", "fedavg")])
    (table,) = domain_tables(found)
    rows = {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}
    marked = [(name, domain) for name, row in rows.items() for domain, cell in row.items() if cell.endswith(" *")]
    assert marked == [("FedDAR-WA", "new (n = 20)")]
    assert table.note == "* Nobody trains on this domain: means of the outputs with the parameters of the others."
    assert table.note in write_report(found, tmp_path / "report.html", title="x").read_text()
    print_summary(runs[0].summary, verbose=False)
    said, value = capsys.readouterr().out, f"{100 * runs[0].summary['domains']['accuracy']['new']:.4g}"
    assert "new *" in said and value in said.split() and "* Nobody trains on this domain." in said
    # one model for all domains has nothing untrained
    assert "untrained_domains" not in runs[1].summary and not any("nobody" in n for n in runs[1].notes)


def test_a_domain_that_others_train_on_needs_no_substitute():
    """c1 has test samples of domain 1 and trains on domain 0 alone."""
    data = only_tested(None)
    clients = tuple(replace(c, test=replace(c.test, domain=c.test.domain % 2)) for c in data)
    run = Run(replace(data, clients=clients), make("feddar-wa"), network(), rounds=2, dtype=torch.float64)
    summary = run.execute()
    expected = by_hand(run, run.federation, lambda t, m: t[m])
    found = summary["domains"]["accuracy"]
    assert {domain: found[domain] for domain in expected} == pytest.approx(expected)
    assert "untrained_domains" not in summary and not run.notes


# Domains with few samples ----------------------------------------------------------------------------------------


def of_sizes(*sizes: int) -> Federation:
    """Two clients, each tested on half of ``sizes[m]`` samples of domain m, and trained on both domains 0 and 1."""
    test = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes) // 2)
    clients = [
        replace(c, train=replace(c.train, domain=torch.arange(len(c.train)) % 2), test=replace(c.test, domain=test))
        for c in blobs((20, 12), test=len(test))
    ]
    return replace(blobs((20, 12)), clients=tuple(clients), domain_names=("many", "ten", "eight")[: len(sizes)])


def test_a_domain_with_fewer_than_ten_test_samples_stays_out_of_mean_and_extremes_and_is_marked(tmp_path, capsys):
    data, directory = of_sizes(40, 10, 8), RunDirectory.create(tmp_path / "run")
    directory.write_config('method = "fedavg"\nseed = 0\n')
    run = Run(data, make("fedavg"), network(), name="fedavg", rounds=1, directory=directory)
    summary = run.execute()
    found = summary["domains"]["accuracy"]
    both = [found["many"], found["ten"]]
    assert (found["mean"], found["min"], found["max"]) == pytest.approx((np.mean(both), min(both), max(both)))
    right = [(run.predict(c.id, c.test.x).argmax(1) == c.test.y)[c.test.domain == 2] for c in data]
    assert found["eight"] == pytest.approx(float(torch.cat(right).float().mean()))
    assert found["mean"] != pytest.approx(np.mean([*both, found["eight"]]))
    assert summary["domain_samples"] == {"many": 40, "ten": 10, "eight": 8}
    line = json.loads((tmp_path / "run" / "rounds.jsonl").read_text())
    assert line["domains"] == summary["domains"]
    few = "domains with fewer than ten test samples: eight (n = 8); mean, min and max over domains are without them"
    assert few in summary["notes"]
    (table,) = domain_tables(load_runs([tmp_path / "run"]))
    assert table.header == ["Method", "many (n = 40)", "ten (n = 10)", "eight (n = 8) †", "mean", "min", "max"]
    assert table.note.startswith("† Fewer than ten samples")
    print_summary(summary, verbose=False)
    assert {"40)", "10)", "(n", "8)"} <= {*capsys.readouterr().out.split()}


def test_where_all_domains_have_few_samples_the_mean_is_over_all_and_says_so():
    run = Run(of_sizes(8, 6), make("fedavg"), network(), rounds=1)
    found = run.execute()["domains"]["accuracy"]
    assert found["mean"] == pytest.approx((found["many"] + found["ten"]) / 2)
    assert any(note.endswith("are over them all the same, as there are no others") for note in run.notes)
