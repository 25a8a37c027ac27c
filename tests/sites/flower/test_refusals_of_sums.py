"""What a private site answers does not depend on whether its rows have changed its state, or on its metrics."""

from __future__ import annotations

import pytest
import torch
from engines import blobs, quick
from in_process_sites import Sites

from perfed.codec import encode
from perfed.engine.metrics import Scoring, metric
from perfed.engine.secure_aggregation import SecureAggregation
from perfed.errors import PerfedError
from perfed.methods.fedavg import FedAvg
from perfed.privacy.client import ClientPrivacy
from perfed.sites.flower.allowed import AllowList
from perfed.sites.flower.masking import Masking
from perfed.sites.flower.store import SiteStore

BEFORE = {"model": {"head.weight": torch.zeros(2)}}
AFTER = {"model": {"head.weight": torch.ones(2)}}


def ask(path, after, *, discreet: bool) -> str:
    """Ask for one payload from two states, with different trained domains; return what the site refuses."""
    allowed = AllowList(5, 3, 2, (), False, (), {}, discreet=discreet)
    with SiteStore(path, "run") as store:
        store.save_exchange(10_001, BEFORE, b"", b"1" * 32)
        store.save_exchange(10_002, after, b"", b"2" * 32)
        masking = Masking(SecureAggregation(), "north", "run", allowed, store, "study")
        header = {"program": "train", "index": 0, "measure": None, "extensions": "all"}
        tree = {"shared": {"w": torch.ones(3)}, "row": {}}
        masking.repeat_exchange({**header, "round": 2, "base": 10_001, "trained": [0]}, tree, BEFORE)
        try:
            masking.repeat_exchange({**header, "round": 3, "base": 10_002, "trained": [0, 1]}, tree, after)
        except PerfedError as error:
            return str(error)
    return ""


def test_under_privacy_a_refusal_does_not_tell_whether_training_has_changed_a_state(tmp_path):
    assert encode(BEFORE) != encode(AFTER)
    assert ask(tmp_path / "same", BEFORE, discreet=True) == ask(tmp_path / "other", AFTER, discreet=True) == ""
    assert "with trained [0]" in ask(tmp_path / "exact", BEFORE, discreet=False)


def test_under_privacy_a_payload_from_one_history_is_still_answered_in_one_way(tmp_path):
    allowed = AllowList(5, 3, 2, (), False, (), {}, discreet=True)
    with SiteStore(tmp_path, "run") as store:
        store.save_exchange(10_001, BEFORE, b"", b"1" * 32)
        masking = Masking(SecureAggregation(), "north", "run", allowed, store, "study")
        header = {"program": "train", "index": 0, "measure": None, "extensions": "all", "base": 10_001, "trained": [0]}
        tree = {"shared": {"w": torch.ones(3)}, "row": {}}
        first, again = (masking.repeat_exchange({**header, "round": number}, tree, BEFORE) for number in (2, 3))
        assert first == again
        with pytest.raises(PerfedError, match=r"with trained \[0\]"):
            masking.repeat_exchange({**header, "round": 4, "trained": [1]}, tree, BEFORE)


@pytest.fixture
def fragile(forgotten) -> str:
    """Return the name of a metric of a user that fails where no row is predicted to be of class 1."""

    @metric("share-of-class-1", direction="higher")
    def share(y, outputs):
        return 1 // int((outputs.argmax(1) == 1).sum())

    return "share-of-class-1"


@pytest.mark.long
def test_an_exact_metric_that_fails_does_not_make_a_private_site_fail(fragile, tmp_path):
    federation = blobs((12, 7, 5), dims=(4,))
    method = quick(FedAvg, extensions=(ClientPrivacy(noise=1.0, entries=("shared", "num_samples")),))
    secrets = {client.id: b"1" * 32 for client in federation}
    sites = Sites(tmp_path, method, federation, secrets=secrets, metrics=(fragile,))
    sites.server.prepare()
    sites.server.measure(Scoring((fragile,)))
    for name, parameter in sites.server.state.shared.items():
        parameter.fill_(0.0)
        if name == "head.bias":
            parameter[0] = 1.0
    sites.server.evaluate("test", round_=1)
    assert [line for store in sites.stores.values() for line in store.notes if "ZeroDivisionError" in line]
    sites.close()
