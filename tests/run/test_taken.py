"""Training that stops by validation: each site takes the model of its own best round."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from engines import blobs, every_tensor, make, network
from pydantic import ValidationError

from perfed.errors import PerfedError
from perfed.experiment.config import validate
from perfed.experiment.start import is_done, resume, start
from perfed.participation.settings import Participation
from perfed.run.directory import RunDirectory
from perfed.run.run import Run
from perfed.run.settings import Evaluation
from perfed.training.plan import Plan

EVERY = Evaluation(every=1, stop="validated", patience=3)


def federation():
    return blobs((12, 9, 30), validation=8, test=20)


def run(name="fedrep", rounds=30, evaluation=EVERY, data=None, **options):
    method = make(name, local_epochs=4, batch_size=4, lr=0.05)
    return Run(
        data or federation(), method, network(), rounds=rounds, evaluation=evaluation, plan=Plan("stacked"), **options
    )


def own_losses(made, split):
    """Cross-entropy of each client's own model, by its predictions alone."""
    losses = {}
    for client in made.federation:
        data = client.split(split)
        logits = made.predict(client.id, data.x)
        losses[client.id] = float(torch.nn.functional.cross_entropy(logits.double(), data.y))
    return losses


@pytest.mark.long
def test_each_site_takes_its_best_round_and_training_ends_when_nobody_improves():
    made = run()
    summary = made.execute()
    best = made.best_models.rounds
    assert len(set(best.values())) > 1, "the sites' best rounds differ here"
    assert summary["rounds"] == max(best.values()) + 3 < 30
    # The same run, told to end after each round: losses on validation data by predictions alone.
    losses = {}
    for number in range(1, summary["rounds"] + 1):
        shorter = run(rounds=number, evaluation=Evaluation(every=100))
        shorter.execute()
        losses[number] = own_losses(shorter, "validation")
        for client, taken in best.items():
            if taken == number:  # the model is that of the round, and what is reported is what it says
                test = next(c for c in made.federation if c.id == client).test
                torch.testing.assert_close(made.predict(client, test.x), shorter.predict(client, test.x))
                expected = shorter.client_metrics[client]["accuracy"]
                assert made.client_metrics[client]["accuracy"] == expected
    for client, taken in best.items():
        assert taken == min(losses, key=lambda number: (losses[number][client], number))
    assert summary["accuracy"]["mean"] == pytest.approx(np.mean([v["accuracy"] for v in made.client_metrics.values()]))
    assert summary["taken_rounds"] == best and any("validation data" in note for note in summary["notes"])


@pytest.mark.long
def test_a_sites_own_model_is_the_one_that_it_takes():
    made = run()
    made.execute()
    after = every_tensor(made.server)
    for client in made.federation:
        expected = made.predict(client.id, client.test.x).softmax(-1)[:, :3]
        found = made.site(client.id).predict_proba(client.test.x.float().numpy())
        np.testing.assert_allclose(found, expected.float().numpy(), atol=1e-5)
    assert all(torch.equal(t, every_tensor(made.server)[name]) for name, t in after.items())


@pytest.mark.long
def test_a_run_that_was_interrupted_takes_the_same(tmp_path):
    whole = run()
    whole.execute()

    class Stop(Exception):
        pass

    def interrupt(number, rounds, accuracy):
        if number == 4:
            raise Stop

    first = run(directory=RunDirectory.create(tmp_path / "one"), checkpoint_seconds=0.0)
    with pytest.raises(Stop):
        first.execute(interrupt)
    second = run(directory=RunDirectory(tmp_path / "one"))
    second.restore()
    assert second.execute()["metrics"] == whole.summary["metrics"]
    assert second.best_models.rounds == whole.best_models.rounds
    for client in whole.federation:
        assert torch.equal(second.predict(client.id, client.test.x), whole.predict(client.id, client.test.x))


@pytest.mark.long
def test_a_stopped_run_is_done_and_opens_with_its_models(tmp_path):
    table = {
        "method": "fedavg-ft",
        "rounds": 40,
        "data": {"name": "digits", "clients": 3, "validation_fraction": 0.3},
        "model": {"head": "linear"},
        "training": {"lr": 0.1},
        "evaluation": {"every": 1, "stop": "validated", "patience": 2},
    }
    done = start(validate(table), out=tmp_path / "one")
    summary = done.execute()
    assert summary["rounds"] < 40 and is_done(tmp_path / "one")
    opened = resume(tmp_path / "one")
    assert opened.best_models.rounds == summary["taken_rounds"]
    assert opened.execute()["metrics"] == summary["metrics"]
    x = done.federation.clients[0].test.x
    assert torch.equal(opened.predict("000", x), done.predict("000", x))


@pytest.mark.long
def test_sites_without_validation_data_take_the_last_round():
    data = federation()
    first, *others = data.clients
    data = replace(data, clients=(replace(first, validation=None), *others))
    made = run(data=data)
    summary = made.execute()
    assert set(summary["taken_rounds"]) == {"c1", "c2"}
    last = run(data=data, rounds=summary["rounds"], evaluation=Evaluation(every=100))
    last.execute()
    assert torch.equal(made.predict("c0", first.test.x), last.predict("c0", first.test.x))


def test_what_takes_no_one_model_is_refused():
    for options in ({"who": "participants"}, {"when": "after"}, {"last": 3}):
        with pytest.raises(ValidationError, match="takes one model of each client"):
            Evaluation(stop="validated", **options)
    with pytest.raises(PerfedError, match="no client has validation data"):
        run(data=blobs())


@pytest.mark.long
@pytest.mark.parametrize("rounds", [2, 8])
def test_with_one_client_a_round_what_is_reported_is_what_the_models_say(rounds):
    """After two rounds somebody was never used: it takes what it settles to; nobody takes a round before its first."""
    alone = Participation(rate=0.3, last_round="sampled")
    impatient = EVERY.model_copy(update={"patience": 1})
    made = run(rounds=rounds, evaluation=impatient, participation=alone)
    made.execute()
    first: dict[str, int] = {}
    for record in made.history:
        assert len(record["participants"]) == 1
        first.setdefault(record["participants"][0], record["round"])
    assert set(made.best_models.rounds) == set(first) and (len(first) == 3 or made.done == rounds)
    for client in made.federation:
        assert made.best_models.rounds.get(client.id, made.done) >= first.get(client.id, 0)
        right = made.predict(client.id, client.test.x).argmax(-1) == client.test.y
        assert made.client_metrics[client.id]["accuracy"] == pytest.approx(float(right.float().mean()))
