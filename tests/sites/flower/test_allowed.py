"""A site's allow-list: it refuses no proper run, and all else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import blobs, make
from in_process_sites import RUN, Sites

from perfed.engine.executor import Background, ChunkTask, Exchange, LocalExecutor
from perfed.engine.initial import Initialiser
from perfed.engine.metrics import Scoring
from perfed.errors import PerfedError
from perfed.method.exchange import Reply
from perfed.method.registry import entry, known_names
from perfed.methods.fedavg import FedAvg
from perfed.model.chain import Model
from perfed.model.presets import hidden_layer, linear
from perfed.participation.settings import Participation
from perfed.sites.flower.engine import Limits
from perfed.sites.flower.message import pack, unpack
from perfed.sites.flower.store import MAX_PAYLOADS, SiteStore
from perfed.sites.flower.wire import get_sequence_number, pack_task
from perfed.training.plan import Plan

PROJECTS = "fedrep-tsne"  # cannot be deployed
FEW = Participation(rate=0.5, fit_unused=True)
CHOSEN = [
    Participation(policy="flanp", flanp={"rule": "gradient", "mu": 0.1, "first": 2}),
    Participation(policy="deadline", deadline={"seconds": 3.0}),
    Participation(policy="srpfl", srpfl={"first": 2, "rule": "fixed", "stage_rounds": 1}),
    Participation(policy="cyclic"),
]


STRICT = Limits(ratio=1e3)  # a thousandth of what is allowed: proper replies are far from the limit


def run_through(sites: Sites, rounds: int) -> None:
    """All that a run's server may ask for: a refusal raises, for the policies need every site that they ask."""
    server = sites.server
    server.prepare()
    used: set[str] = set()
    for number in range(1, rounds + 1):
        used |= set(server.round(number, measure="test").participants)
        server.evaluate("test", round_=number, never_used=set(sites.stores) - used)
        server.evaluate("validation", round_=number)
    server.settle(sorted(set(sites.stores) - used), rounds)
    server.evaluate("test", round_=rounds)
    refused = [unpack(reply)[0]["error"] for _, reply in sites.transport.came if "error" in unpack(reply)[0]]
    assert not refused and len({site for site, _ in sites.transport.sent}) == len(sites.stores)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in known_names() if name != PROJECTS])
def test_no_message_of_a_proper_run_is_refused(name, tmp_path):
    """Sites of other sizes, classes and columns, of which few take part, each with a rehearsal of its own."""
    personal = any(extension.name == "anchors" for extension in make(name).extensions)
    labels = [[0, 1, 2, 3], [0, 1], [2, 3, 1], [0, 3]]
    sizes, dims = (9, 14, 7, 6), (5, 3, 7) if personal else (5,)
    federation = blobs(sizes, dims=dims, num_classes=4, labels=labels, validation=4)
    participation = Participation(fit_unused=True) if entry(name).policy else FEW
    options = {"participation": participation, "rounds": 3, "validated": True, "limits": STRICT}
    run_through(Sites(tmp_path, make(name), federation, **options), 3)


@pytest.mark.long
@pytest.mark.parametrize("participation", CHOSEN, ids=lambda chosen: chosen.policy)
def test_no_policy_asks_for_more(participation, tmp_path):
    name = "fedrep" if participation.policy == "flanp" else "fedfomo"  # which moves nothing that has a gradient
    federation = blobs((9, 14, 7, 6, 8), validation=4)
    run_through(Sites(tmp_path, make(name), federation, participation=participation, rounds=4, validated=True), 4)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedavg", "flic-hl", "feddar-sa"])
def test_a_run_of_values_is_not_refused(name, tmp_path):
    federation = blobs((9, 14, 7), regression=True, validation=4)
    options = {"participation": FEW, "rounds": 3, "validated": True, "limits": STRICT}
    run_through(Sites(tmp_path, make(name), federation, **options), 3)


@pytest.mark.long
def test_a_warm_up_may_end_after_many_rounds(tmp_path):
    sites = Sites(tmp_path, make("feddar-sa", warmup_rounds=70), blobs((6, 5)), rounds=100)
    sites.server.prepare()
    for number in (1, 70, 71, 100):
        sites.server.round(number)
    programs = {unpack(data)[0]["program"] for _, data in sites.transport.sent}
    assert programs == {"count", "warm_up", "train_heads", "train_body"}


# Attacks -----------------------------------------------------------------------------------------------------

ROWS, BINS = 48, 400


def crafted(initialiser: Initialiser, client: Any) -> dict[str, torch.Tensor]:
    """Weights that measure one direction: unit j lets the rows pass that are beyond the j-th bin (Fowl et al. 2022)."""
    shared = {
        name: torch.zeros_like(tensor) for name, tensor in initialiser.chain(client.input_shape).tensors().items()
    }
    direction = torch.randn(client.input_shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight, bias = (next(n for n in shared if n.startswith("body") and n.endswith(kind)) for kind in ("weight", "bias"))
    shared[weight] += direction
    shared[bias] -= torch.linspace(-12, 12, BINS, dtype=torch.float64)
    shared["head.weight"][0] += 1e-3
    return shared


def rows_in(gradient: dict[str, torch.Tensor]) -> torch.Tensor:
    """What falls between one bin and the next, as it came."""
    weight = next(g for name, g in gradient.items() if name.startswith("body") and name.endswith("weight"))[0]
    bias = next(g for name, g in gradient.items() if name.startswith("body") and name.endswith("bias"))[0]
    return (weight[:-1] - weight[1:]) / (bias[:-1] - bias[1:]).unsqueeze(1)


def test_crafted_weights_bring_rows_back_from_a_gradient_which_no_site_of_fedavg_gives(tmp_path):
    federation = blobs((ROWS, ROWS), dims=(6,), num_classes=2)
    model = Model(body=hidden_layer(BINS), head=linear(2))
    sites = Sites(tmp_path, FedAvg(), federation, model=model)
    engine, client = sites.server.engine, federation.clients[0].to(torch.float64, "cpu")
    initialiser = engine.initialiser
    exchange = Exchange(":gradient", 1, 2000)
    work = ChunkTask(exchange, ("c0",), {"shared": crafted(initialiser, client)}, {}, {}, Scoring(), keep_outputs=False)
    done = LocalExecutor(
        [client], Background.from_federation(federation, engine.info), initialiser, Plan("sequential")
    ).run(work)
    found = rows_in(done.content["gradient"])
    near = (client.train.x[:, None] - found.nan_to_num(1e9)[None]).abs().amax(2).amin(1)
    assert int((near < 1e-3).sum()) > ROWS / 2
    message = pack_task(work, RUN, get_sequence_number(exchange), 0, (), engine.background)
    with pytest.raises(PerfedError, match="program is ':gradient', which the study does not ask for"):
        sites.transport.at["c0"].answer(message)


@pytest.fixture
def asked(tmp_path) -> tuple[Sites, dict[str, Any], dict[str, Any]]:
    """A run of FedAvg after its first round, and what a site was asked in it."""
    sites = Sites(tmp_path, make("fedavg"), blobs())
    sites.server.prepare()
    sites.server.round(1)
    header, tree = unpack(next(data for site, data in sites.transport.sent if site == "c0"))
    return sites, header, tree


ODD: list[tuple[dict[str, Any], str]] = [
    ({"program": "parse_raw"}, "program is 'parse_raw', which the study does not ask for"),
    ({"program": "model_validate"}, "program is 'model_validate'"),
    ({"program": "personalise"}, "program is 'personalise' as exchange 0 of round 1"),
    ({"program": ":gradient", "index": 2000, "sequence": 12_001}, "program is ':gradient'"),
    ({"program": "x" * 10**5}, "program is 'xxx"),
    ({"program": ["train"]}, "program is .*; a text is needed"),
    ({"round": 10**30, "sequence": 10**34 + 1}, "round is 10000000000.*; the study has 10"),
    ({"round": 11, "sequence": 110_001}, "round is 11; the study has 10"),
    ({"round": 0, "sequence": 1}, "program is 'train' as exchange 0 of round 0"),
    ({"round": True}, "round is True; a whole number"),
    ({"index": 1, "sequence": 10_002}, "program is 'train' as exchange 1 of round 1"),
    ({"index": -1, "sequence": 19_999}, "program is 'train' as exchange -1 of round 1"),
    ({"measure": "train"}, "measure is 'train'"),
    ({"measure": "validation"}, "measure is 'validation'"),
    ({"extensions": "all"}, "program is 'train' as exchange 0 of round 1"),
    ({"sequence": 10_003}, "sequence is 10003; 10001 is needed"),
    ({"base": 10_001}, "base is 10001; a number below 10001 is needed"),
    ({"clients": 10**9}, "clients is 1000000000; 3 is needed"),
    ({"domains": 3}, "domains is 3; 2 is needed"),
    ({"trained": [0, 0]}, r"trained is \[0, 0\]"),
    ({"keep": [1.5]}, "keep is .*; a list of whole numbers is needed"),
    ({"scoring": {"metrics": ["brier"], "held": False}}, "scoring is"),
    ({"scoring": {"metrics": [], "held": True}}, "scoring is"),
    ({"scoring": None}, "scoring is None"),
    ({"run": "other"}, "run is 'other'; 'run' is expected"),
    ({"kind": "study"}, "kind is 'study'; 'work' is expected"),
    ({"more": 1}, "has 'more', which is not expected"),
]


@pytest.mark.long
@pytest.mark.parametrize(("fields", "said"), ODD, ids=[" ".join(fields) for fields, _ in ODD])
def test_what_the_study_does_not_ask_for_is_refused_in_one_line(fields, said, asked):
    sites, header, tree = asked
    with pytest.raises(PerfedError, match=f"^the server's message: {said}") as error:
        sites.transport.at["c0"].answer(pack({**header, **fields}, tree))
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.long
def test_a_field_that_is_missing_is_named(asked):
    sites, header, tree = asked
    for name in header:
        with pytest.raises(PerfedError, match=f"{name} is missing from the header"):
            sites.transport.at["c0"].answer(pack({n: v for n, v in header.items() if n != name}, tree))


Change = Callable[[dict[str, Any]], object]


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tree: tree["shared"].update(more=torch.zeros(0)), "'shared/more', which is not expected"),
        (lambda tree: tree["row"].update(shared=torch.zeros(2)), "which is not expected|bytes of tensors"),
        (lambda tree: tree["shared"]["shared"].popitem(), "lacks 'shared/shared/"),
        (lambda tree: tree["shared"]["shared"]["head.bias"].fill_(torch.nan), "3 values that are not finite"),
        (lambda tree: tree["shared"]["shared"].update({"head.bias": torch.zeros(2, dtype=torch.float64)}), "has shape"),
        (lambda tree: tree["shared"]["shared"].update({"head.bias": torch.zeros(3)}), "is float32; float64"),
        (lambda tree: tree["shared"]["shared"].update({"head.bias": torch.zeros(10**5)}), "bytes of tensors; at most"),
    ],
)
def test_a_payload_that_the_study_does_not_send_is_refused(change: Change, said, asked):
    sites, header, tree = asked
    change(tree)
    with pytest.raises(PerfedError, match=said):
        sites.transport.at["c0"].answer(pack(header, tree))


@pytest.mark.long
def test_an_exchange_is_not_done_with_any_number_of_payloads(asked, tmp_path):
    """Three payloads of an exchange are answered, whoever asks how often; another is not, after a restart either."""
    sites, header, tree = asked
    site = sites.transport.at["c0"]

    def message(number: float) -> bytes:
        bias = torch.full_like(tree["shared"]["shared"]["head.bias"], number)
        return pack(header, {**tree, "shared": {"shared": {**tree["shared"]["shared"], "head.bias": bias}}})

    for number in range(1, MAX_PAYLOADS):
        site.answer(message(number))
    site.answer(pack({**header, "keep": [10_000]}, tree))  # the first one, though other states are to be kept
    with pytest.raises(PerfedError, match="exchange 10001 was already requested with 3 payloads"):
        site.answer(message(MAX_PAYLOADS))
    site.answer(message(1))
    sites.close()
    with SiteStore(tmp_path / "c0", RUN) as store:
        assert not store.admit_request(10_001, "train None another") and store.admit_request(
            20_001, "train None another"
        )


class Curious(FedAvg):
    """Sends its rows where a weight of the server says so."""

    def train(self, cohort: Any, shared: dict[str, Any]) -> Reply:
        reply = super().train(cohort, shared)
        return Reply(**reply, rows=cohort.samples().x[None]) if float(shared["head.bias"].max()) > 1e3 else reply


@pytest.mark.long
def test_a_reply_that_the_rehearsal_did_not_give_does_not_leave(tmp_path):
    sites = Sites(tmp_path, Curious(batch_size=4), blobs())
    sites.server.prepare()
    sites.server.round(1)
    header, tree = unpack(sites.transport.sent[-1][1])
    tree["shared"]["shared"]["head.bias"].fill_(1e4)
    with pytest.raises(PerfedError, match="the reply: "):
        sites.transport.at[sites.transport.sent[-1][0]].answer(pack(header, tree))
