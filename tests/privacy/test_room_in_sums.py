"""What a private client sums under masks must fit, whatever its rows are and whatever noise it draws."""

from __future__ import annotations

import pytest
from engines import quick

from perfed.errors import PerfedError
from perfed.maths.sums import FixedPoint
from perfed.method.disclosure import Disclosure
from perfed.method.exchange import Reply
from perfed.method.extension import Extension
from perfed.methods.fedavg import FedAvg
from perfed.privacy.apply import make_private
from perfed.privacy.metrics import EvaluationPlan
from perfed.privacy.settings import Privacy

LARGEST = FixedPoint(24, 3).largest_value  # 9.2e10


def planned(**settings: float):
    own = Privacy(unit="client", noise=2.0, delta=1e-3, metrics="noisy", **settings)
    return make_private(quick(FedAvg), own, 3, None, shares=2, evaluation=EvaluationPlan((), (3,)))


@pytest.mark.parametrize("clip", [1.0, 1e9])
@pytest.mark.parametrize("bound", [1.0, 1e9])
def test_what_surely_fits_is_allowed(clip, bound):
    planned(clip=clip).check_room(LARGEST, {"mse": bound})


@pytest.mark.parametrize(
    ("clip", "bound", "name"), [(1.0, 1e12, "the bound of metric 'mse'"), (1e10, 1.0, r"privacy\.clip")]
)
def test_what_may_not_fit_is_refused_by_name(clip, bound, name):
    """Of a target from 0 to a million the bound of mse is 1e12: whether the metric fits would tell of its rows."""
    with pytest.raises(PerfedError, match=name):
        planned(clip=clip).check_room(LARGEST, {"mse": bound})


class Signs(Extension):
    """Sends the signs of all numbers."""

    name = "signs"
    disclosure = Disclosure({})

    def outgoing(self, cohort, reply: Reply) -> Reply:
        return Reply({name: value.sign() for name, value in reply["shared"].items()})


@pytest.mark.parametrize("shares", [0, 2])
def test_an_extension_that_changes_replies_cannot_be_used_where_a_reply_has_a_share_of_the_noise(shares):
    method = quick(FedAvg, extensions=(Signs(),))
    own = Privacy(unit="client", noise=2.0, delta=1e-3)
    if not shares:
        make_private(method, own, 3, None)
        return
    with pytest.raises(PerfedError, match="the extension 'signs', which changes replies"):
        make_private(method, own, 3, None, shares=shares)
