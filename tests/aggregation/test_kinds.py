from __future__ import annotations

import pytest
import torch

from perfed.aggregation import Aggregation, Aggregator, aggregator_names, register_aggregator
from perfed.errors import PerfedError
from perfed.experiment.config import validate
from perfed.maths.aggregate import masked_mean, weighted_mean

KINDS = {
    "mean": Aggregation(),
    "median": Aggregation(kind="median"),
    "trimmed-mean": Aggregation(kind="trimmed-mean", trim=0.3),
    "norm-bound": Aggregation(kind="norm-bound", bound=2.0),
}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_clients_of_weight_zero_do_not_count(kind):
    x, current = {"w": draw(5, 3), "inner": {"b": draw(5)}}, {"w": torch.zeros(3), "inner": {"b": torch.tensor(0.0)}}
    weights = torch.tensor([2.0, 0.0, 1.0, 0.0, 4.0])
    some = {"w": x["w"][[0, 2, 4]], "inner": {"b": x["inner"]["b"][[0, 2, 4]]}}
    aggregator = KINDS[kind].aggregator
    torch.testing.assert_close(
        aggregator.aggregate(x, weights, current), aggregator.aggregate(some, weights[[0, 2, 4]], current)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_classes_are_aggregated_over_the_clients_that_have_them(kind):
    means, current = draw(5, 4, 3), draw(4, 3)
    counts = torch.tensor([[3, 0, 0, 1], [1, 2, 0, 0], [0, 5, 0, 0], [2, 1, 0, 0], [4, 1, 0, 0]])
    aggregator = KINDS[kind].aggregator
    result = aggregator.aggregate({"mean": means}, counts, {"mean": current})["mean"]
    for k in range(4):
        rows = counts[:, k] > 0
        if not rows.any():
            assert torch.equal(result[k], current[k])
            continue
        alone = aggregator.aggregate({"x": means[rows, k]}, counts[rows, k], {"x": current[k]})["x"]
        torch.testing.assert_close(result[k], alone)


def test_the_mean_keeps_its_bits():
    x, weights, counts = draw(6, 40), torch.tensor([1, 5, 2, 8, 3, 3]), torch.tensor([[1, 0]] * 5 + [[2, 0]])
    aggregator = Aggregation().aggregator
    assert aggregator.is_mean
    assert torch.equal(aggregator.aggregate({"x": x}, weights, {"x": x[0]})["x"], weighted_mean({"x": x}, weights)["x"])
    assert torch.equal(aggregator.aggregate({"x": x}, None, {"x": x[0]})["x"], weighted_mean({"x": x})["x"])
    y = draw(6, 2, 7)
    classes = aggregator.aggregate({"x": y}, counts, {"x": y[0]})["x"]
    assert torch.equal(classes, masked_mean(y, counts, y[0]))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"kind": "medain"}, "there is no such kind (did you mean 'median'?); allowed: mean, median, norm-bound"),
        ({"kind": "median", "trim": 0.1}, "unknown key 'aggregation.trim'; allowed with kind = 'median': kind"),
        ({"trim": 0.1}, "unknown key 'aggregation.trim'; allowed with kind = 'mean': kind"),
        ({"kind": "norm-bound", "bond": 1.0}, "did you mean 'bound'"),
        ({"kind": "no_such_module:x"}, "cannot import 'no_such_module'"),
        ("median", "aggregation must be a table (given: 'median'); write aggregation.kind = 'median'"),
        ({"kind": 3}, "aggregation.kind: input should be a valid string (given: 3)"),
    ],
)
def test_bad_tables_are_refused_in_one_line(table, said):
    with pytest.raises(PerfedError) as caught:
        validate({"rounds": 1, "data": {"name": "digits"}, "model": {"head": "linear"}, "aggregation": table})
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", [{"trim": 0.5}, {"trim": -0.1}, {"trim": "much"}, {"trim": float("nan")}])
def test_settings_have_limits(settings):
    with pytest.raises(ValueError, match="trim"):
        Aggregation(kind="trimmed-mean", **settings)
    assert Aggregation(kind="Trimmed-Mean").kind == "trimmed-mean"
    assert Aggregation(kind="trimmed-mean", trim=0.2).aggregator.settings.trim == 0.2


def test_a_table_is_written_as_it_is_read():
    for aggregation in KINDS.values():
        assert Aggregation.model_validate(aggregation.model_dump(mode="json")) == aggregation


LARGEST = """
from pydantic import Field
from perfed.aggregation import Aggregator, AggregatorSettings, register_aggregator

class LargestSettings(AggregatorSettings):
    factor: float = Field(1.0, gt=0)

@register_aggregator("largest", settings=LargestSettings)
class Largest(Aggregator[LargestSettings]):
    '''The values of the client with the largest weight.'''

    def combine(self, stacked, weights, current):
        return {name: self.settings.factor * x[weights.argmax()] for name, x in stacked.items()}
"""


def test_a_kind_in_a_file_of_the_users(tmp_path, monkeypatch, forgotten):
    (tmp_path / "my_kinds.py").write_text(LARGEST)
    monkeypatch.syspath_prepend(tmp_path)
    aggregation = Aggregation(kind="my_kinds:largest", factor=2.0)
    result = aggregation.aggregator.aggregate(
        {"w": torch.tensor([1.0, 5.0])}, torch.tensor([1, 3]), {"w": torch.zeros(())}
    )
    assert float(result["w"]) == 10.0
    assert aggregation.model_dump() == {"kind": "my_kinds:largest", "factor": 2.0}
    assert "largest" in aggregator_names()
    with pytest.raises(ValueError, match="allowed with kind = 'my_kinds:largest': kind, factor"):
        Aggregation(kind="my_kinds:largest", trim=0.1)


def test_names_and_settings_that_cannot_be_registered():
    from perfed.aggregation.kinds.median import Median
    from perfed.aggregation.settings import Aggregation as Table

    with pytest.raises(PerfedError, match="a name has no"):
        register_aggregator("a:b")(Median)
    with pytest.raises(PerfedError, match="'kind' cannot be one of its settings"):
        register_aggregator("mine", settings=Table)(Median)

    class Other(Aggregator):
        pass

    with pytest.raises(PerfedError, match="registered twice"):
        register_aggregator("Median")(Other)
    with pytest.raises(PerfedError, match="'mine': Other does not define combine"):
        register_aggregator("mine")(Other)
