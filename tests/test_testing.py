"""Checks of methods of one's own: a good method passes all, and each kind of mistake fails the check that is for it."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from pydantic import Field, PrivateAttr
from short_part import SHORT_METHODS

from perfed import PerfedError, Reply, weighted_mean
from perfed.method import Method
from perfed.method.extension import Extension
from perfed.method.registry import METHODS, entry, method_names, register
from perfed.methods.build import build_method
from perfed.methods.extensions.clip import Clip
from perfed.methods.fedavg import FedAvg
from perfed.placement import PERSONAL, SHARED
from perfed.testing import check_method, method_checks


class FedPer(Method):
    """Shared body, personal head."""

    default_placement: ClassVar = {"embedding": SHARED, "body": SHARED, "head": PERSONAL}

    def round(self, server, clients):
        reply = clients.train(self.train, shared=server.shared)
        server.shared = weighted_mean(reply.shared, reply.num_samples)

    def train(self, cohort, shared):
        cohort.load(shared)
        cohort.fit(("embedding", "body", "head"), epochs=self.local_epochs)
        return Reply(shared=cohort.shared(), num_samples=cohort.num_samples)


def bent(cohort, by) -> Reply:
    """FedPer's reply, with ``by`` added to everything."""
    return Reply(shared={n: t + by for n, t in cohort.shared().items()}, num_samples=cohort.num_samples)


class Mixes(FedPer):
    """A client's parameters have something of the others' in them."""

    def train(self, cohort, shared):
        super().train(cohort, shared)
        mixed = {n: 0.9 * t + 0.1 * t.mean(0, keepdim=True) for n, t in cohort.shared().items()}
        return Reply(shared=mixed, num_samples=cohort.num_samples)


class CountsTheCohort(FedPer):
    """What a client sends depends on how many others are beside it."""

    def train(self, cohort, shared):
        super().train(cohort, shared)
        return bent(cohort, 1e-3 * cohort.n)


class Remembers(FedPer):
    """Clients keep in the method how often they took part."""

    seen: dict[str, int] = Field(default_factory=dict)

    def train(self, cohort, shared):
        super().train(cohort, shared)
        self.seen.update({i: self.seen.get(i, 0) + 1 for i in cohort.ids})
        return bent(cohort, 1e-3 * self.seen[cohort.ids[0]])


class CountsRounds(FedPer):
    """The server keeps in the method how many rounds there were."""

    _rounds: int = PrivateAttr(0)

    def round(self, server, clients):
        super().round(server, clients)
        self._rounds += 1
        server.shared = {n: t * (1 + 0.01 * self._rounds) for n, t in server.shared.items()}


class Dice(FedPer):
    """Random numbers come from the global generator."""

    def train(self, cohort, shared):
        super().train(cohort, shared)
        return bent(cohort, 1e-3 * torch.rand(()))


class Sets(FedPer):
    """A set that nobody declared."""

    def train(self, cohort, shared):
        reply = super().train(cohort, shared)
        cohort.state["mine"] = dict(cohort.received)
        return reply


class Lazy(FedPer):
    """Trains nothing at all."""

    def train(self, cohort, shared):
        cohort.load(shared)
        return Reply(shared=cohort.shared(), num_samples=cohort.num_samples)


class Overflows(FedPer):
    """Cannot do with one sample."""

    def train(self, cohort, shared):
        super().train(cohort, shared)
        return bent(cohort, cohort.num_samples.min() / (cohort.num_samples.min() - 1) * 0)


@pytest.mark.long
@pytest.mark.parametrize("name", method_checks(FedPer))
def test_a_good_method_passes(name):
    method_checks(FedPer)[name]()


@pytest.mark.long
def test_all_at_once_with_settings():
    check_method(FedPer(lr=0.02, batch_size=8, local_epochs=2))


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Mixes, r"fails 'clients are not mixed' \(what one .*the reply of client 'c0' changes with the data of 'c2'"),
        (
            CountsTheCohort,
            r"fails 'engines agree' \(.*all clients at once, against one client at a time: states ",
        ),
        (Remembers, r"fails 'state is declared' \(.*declare state in sets\(\)"),
        (CountsRounds, r"fails 'a resumed run ends with the same bits' \(.*outside sets\(\)"),
        (Dice, r"fails 'the seed decides' \(.*random numbers come from keys"),
        (Sets, r"fails 'learns' \(.*'mine' is not a declared parameter set"),
        (
            Lazy,
            r"fails 'learns' \(.*the mean accuracy on training data is 0\.\d\d after 240 rounds; it must exceed 0\.67",
        ),
        (Overflows, r"fails 'trains on a client with one sample' \(.*not finite"),
    ],
    ids=lambda given: given.__name__ if isinstance(given, type) else "",
)
def test_a_mistake_fails_the_check_that_is_for_it(kind, said):
    with pytest.raises(PerfedError, match=f"^{kind.__name__} {said}") as error:
        check_method(kind)
    assert "\n" not in str(error.value)


@pytest.mark.long
@pytest.mark.parametrize("name", ["learns", "the seed decides"])
@pytest.mark.parametrize("extensions", [(), [Clip(clip_norm=10.0)]], ids=["plain", "list of extensions"])
def test_a_shipped_method_with_its_default_settings_passes(name, extensions):
    method_checks(build_method("fedavg", {}))[name]()
    method_checks(FedAvg(extensions=extensions))[name]()


def default_method(name: str) -> Method | str:
    """A shipped method with its default settings; the name where the method has a policy of participation."""
    return name if entry(name).base else build_method(name, {})


@pytest.mark.long
@pytest.mark.parametrize("name", method_names())
@pytest.mark.every_method("name")
def test_shipped_methods_learn_with_default_settings(name):
    method_checks(default_method(name))["learns"]()


@pytest.mark.long
@pytest.mark.parametrize("name", ["scaffold", "fedgate"])
def test_methods_that_need_many_rounds_learn_with_the_settings_of_the_checks(name):
    method_checks(name)["learns"]()


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(SHORT_METHODS))  # all methods pass the conformance suite
def test_shipped_methods_with_default_settings_pass_all_checks(name):
    check_method(default_method(name))


@pytest.mark.parametrize("given", [[Clip(clip_norm=1.0)], Clip, Clip(clip_norm=1.0), None, 3, (FedAvg,)], ids=repr)
def test_what_is_no_method_is_refused_in_one_line(given):
    with pytest.raises(PerfedError, match=r"check_method takes the class of a method.*given: ") as error:
        check_method(given)
    assert "\n" not in str(error.value)


class Spoils(Extension):
    """Makes everything that leaves infinite."""

    name: ClassVar[str] = "spoils"
    strength: float = 0.0

    def outgoing(self, cohort, reply):
        return Reply(shared={n: t / 0 for n, t in reply["shared"].items()}, num_samples=reply["num_samples"])


@pytest.fixture
def registered():
    """FedPer under two names, of which one has an extension; Remembers and Lazy always have one."""
    register("per", summary="x")(FedPer)
    for name, kind in {
        "per-spoilt": FedPer,
        "lazy": Lazy,
        "lazier": Lazy,
        "remembers": Remembers,
        "counts": CountsRounds,
    }.items():
        register(name, extensions=(Spoils,), defaults={"strength": 1.0, "lr": 0.01})(kind)
    register("counts-plain", summary="x")(CountsRounds)
    yield
    for name in ("per", "per-spoilt", "lazy", "lazier", "remembers", "counts", "counts-plain"):
        del METHODS[name]


def test_a_registered_method_is_checked_with_its_extensions(registered):
    method_checks(FedPer)["trains on one client"]()
    method_checks("per")["trains on one client"]()
    for given, label in (("per-spoilt", "per-spoilt"), (Remembers, "Remembers"), ("lazy", "lazy")):
        with pytest.raises(PerfedError, match=f"^{label} fails 'trains on one client'"):
            method_checks(given)["trains on one client"]()
    with pytest.raises(PerfedError, match="Lazy is registered as lazy, lazier, with extensions; check one of"):
        check_method(Lazy)
    with pytest.raises(PerfedError, match="CountsRounds is registered as counts, counts-plain, with extensions"):
        check_method(CountsRounds)
    with pytest.raises(PerfedError, match="unknown method 'lasy'; did you mean: lazy"):
        check_method("lasy")
