"""Steps in place of epochs: mini-batches go on where the last round stopped."""

from __future__ import annotations

from itertools import chain

import pytest
from engines import blobs, difference, every_tensor, make, serve, train

from perfed.errors import PerfedError
from perfed.method.exchange import Reply
from perfed.methods.build import build_method
from perfed.methods.fedavg import FedAvg
from perfed.model.chain import STAGES
from perfed.participation.clock import Clock
from perfed.training.step import mean_loss

SIZES, BATCH, STEPS = (13, 9, 4, 1), 4, 5


def watched(**options) -> dict[str, list[list[int]]]:
    """The rows of every mini-batch of every client in five rounds of FedAvg."""
    seen: dict[str, list[list[int]]] = {}

    class Watched(FedAvg):
        def train(self, cohort, shared):
            def loss(step):
                starts = cohort.samples().starts[step.rows]
                index, valid = step.block.index[step.at].numpy(), step.block.valid[step.at]
                for row, start, rows, real in zip(step.rows, starts, index, valid, strict=True):
                    seen.setdefault(cohort.ids[row], []).append((rows[real] - start).tolist())
                return mean_loss(step)

            cohort.load(shared)
            cohort.fit(STAGES, epochs=self.local_epochs, loss=loss)
            return Reply(shared=cohort.shared(), num_samples=cohort.num_samples)

    method = Watched(batch_size=BATCH, local_epochs=1, local_steps=STEPS)
    train(serve(method, blobs(SIZES), **options), 5)
    return seen


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_rounds_go_through_the_data_shuffle_after_shuffle(rate):
    """As an endless loader that is made anew, and shuffled, when it is at its end (FLamby's)."""
    found = watched(rate=rate)
    for client, size in zip(("c0", "c1", "c2", "c3"), SIZES, strict=True):
        batches = found[client]
        assert len(batches) % STEPS == 0 and (rate < 1 or len(batches) == 5 * STEPS)
        passes = -(-size // BATCH)
        shuffles = [list(chain(*batches[at : at + passes])) for at in range(0, len(batches), passes)]
        *whole, last = shuffles
        assert all(sorted(shuffle) == list(range(size)) for shuffle in whole)
        assert len(set(last)) == len(last)
        assert size <= BATCH or len({tuple(shuffle) for shuffle in whole}) == len(whole)
    assert rate == 1 or len({len(batches) for batches in found.values()}) > 1  # some took part more often


@pytest.mark.long
def test_mini_batches_are_the_same_in_every_engine():
    assert watched(engine="stacked") == watched(engine="sequential")


def test_the_position_is_the_clients_and_a_run_goes_on_from_it():
    federation = blobs(SIZES)

    def server():
        return serve(make("fedrep", local_epochs=2, local_steps=6), federation, rate=0.5)

    whole, first, second = train(server(), 4), train(server(), 2), server()
    second.restore(first.snapshot())
    for number in (3, 4):
        second.round(number)
    assert difference(second, whole) == 0
    seen = {c: int(t) for (c, *path), t in every_tensor(whole).items() if path == ["mini-batches", "steps"]}
    # Six steps of the head and three of the representation, in each round that a client took part in: two of four do.
    assert sum(seen.values()) == 9 * 2 * 4 and all(count % 9 == 0 for count in seen.values())


def test_clocks_count_them():
    clock = Clock(speeds="steps", steps={"seconds": 1.0})
    server = serve(make("fedrep", local_epochs=2, local_steps=6, body_epochs=1), blobs((5, 21)), clock=clock)
    server.prepare()
    assert server.round(1).replied == {"c0": 9.0, "c1": 9.0}


def test_an_epoch_is_a_whole_number_of_steps():
    assert build_method("fedavg-ft", {"local_steps": 100}).epoch_steps == 10
    with pytest.raises(PerfedError, match=r"local_steps: must be a multiple of local_epochs = 3"):
        build_method("fedavg", {"local_steps": 100, "local_epochs": 3})
