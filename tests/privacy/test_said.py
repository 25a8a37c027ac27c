"""Where what was spent is said: cards of models and verdicts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from privacy_tables import PAGE, written

from perfed import start, validate
from perfed.client_model.card import card
from perfed.report.warnings import describe_spent_privacy

TABLE = {
    "method": "fedper",
    "rounds": 2,
    "data": {"name": "digits", "clients": 3},
    "model": {"body": {"kind": "mlp", "hidden": [8], "out": 8}, "head": "linear"},
    "training": {"local_epochs": 1},
    "privacy": {"epsilon": 6.0, "delta": 1e-3},
}


@pytest.mark.long
def test_the_card_of_a_model_says_what_its_client_has_spent():
    run = start(validate(TABLE))
    summary = run.execute()
    text = card(run.site("000").facts)
    assert f"epsilon {summary['privacy']['spent']['000']:.4g} spent at delta 0.001" in text
    plain = start(validate({name: value for name, value in TABLE.items() if name != "privacy"}))
    plain.execute()
    assert "## Privacy" not in card(plain.site("000").facts)


def test_a_verdict_says_what_each_method_has_spent():
    def run(method, values):
        privacy = {"unit": "sample", "delta": 1e-3, "spent": values}
        return SimpleNamespace(method=method, summary=SimpleNamespace(privacy=privacy))

    (line,) = describe_spent_privacy(
        [run("fedavg", {"a": 1.0, "b": 5.5}), run("fedavg", {"a": 2.0}), run("local", {"a": 3.0})]
    )
    assert "of each row (delta 0.001)" in line and "FedAvg 5.5, Local 3." in line
    assert describe_spent_privacy([SimpleNamespace(method="fedavg", summary=SimpleNamespace(privacy=None))]) == []


def test_the_page_says_what_the_code_says():
    page = PAGE.read_text()
    assert written(page) == page, "run: python docs/privacy_tables.py"
    assert "| `fedavg` | shared (parameters), num_samples (number of rows) | yes | yes |" in page
