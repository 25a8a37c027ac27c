"""The LSTM preset: torch's own LSTM, padding that changes nothing, keyed dropout, word vectors from files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engines import CodecEngine, difference, make, serve, train
from torch import nn

from perfed import rng
from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.experiment.build import build_stage
from perfed.model.chain import Model
from perfed.model.lstm import TextLSTM, lstm, read_vectors
from perfed.model.presets import linear
from perfed.model.stacked import Pass, apply_module, why_not_stackable
from perfed.training.plan import Plan

WORDS = ("flight", "late", "thanks", "!")
VECTORS = {"late": [1.0, 2.0, 3.0], "!": [-1.0, 0.5, 0.25], "other": [9.0, 9.0, 9.0]}


def small(**settings):
    return {"vocabulary": 8, "dimension": 3, "width": 4, **settings}


def texts(count=6, length=5, seed=0):
    """Random tokens, of which the first 1 to ``length`` count and the rest are padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 10, (count, length), generator=generator)
    lengths = torch.arange(count) % length + 1
    return torch.where(torch.arange(length) < lengths[:, None], ids, 0).double()


def module(seed=0, **settings) -> nn.Module:
    with rng.seed_torch(rng.key(seed)):
        return lstm(**small(**settings))((5,)).double()


def run(stage: nn.Module, x: torch.Tensor, key: int | None = None) -> torch.Tensor:
    """One client's output; in training with ``key``."""
    params = {f"s.{name}": t.detach()[None] for name, t in stage.named_parameters()}
    keys = None if key is None else rng.key(key, torch.arange(1))
    return apply_module(stage, "s", x[None], Pass(params, keys, training=key is not None))[0]


def test_it_is_torchs_bidirectional_lstm_on_each_text_without_its_padding():
    stage = module(layers=2, fc=(5,))
    text_lstm, fc = stage[0], stage[1]
    whole = nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True).double()
    with torch.no_grad():
        for name, tensor in whole.named_parameters():
            kind, _, rest = name.partition("_l")
            number, end = rest[0], rest[1:]
            tensor.copy_(text_lstm.layers[int(number)].get_parameter(f"{kind}_l0{end}"))
    x = texts()
    found = run(stage, x)
    assert found.shape == (6, 5)
    for row, ids in zip(found, x.long(), strict=True):
        tokens = text_lstm.embedding.weight[ids[ids > 0]][None]
        _, (h, _) = whole(tokens)
        torch.testing.assert_close(row, fc(torch.cat([h[-2, 0], h[-1, 0]])).relu(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("key", [None, 3], ids=["evaluation", "training"])
def test_padding_changes_nothing_wherever_it_stands(key):
    stage, x = module(dropout=0.5), texts()
    expected = run(stage, x, key)
    behind = torch.cat([x, torch.zeros(6, 4)], 1)
    before = torch.cat([torch.zeros(6, 2), x], 1)
    between = torch.stack([x, torch.zeros(6, 5)], 2).flatten(1)
    for padded in (behind, before, between):
        assert torch.equal(run(stage, padded, key), expected)
    assert not torch.allclose(run(stage, x.clamp_min(1), key), expected)  # as tokens they do change it


def test_gradients_do_not_depend_on_padding_and_padding_is_not_learnt():
    stage = module(dropout=0.0)
    found = []
    for x in (texts(), torch.cat([texts(), torch.zeros(6, 3)], 1)):
        stage.zero_grad()
        stage(x).square().sum().backward()
        found.append([p.grad.clone() for p in stage.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    weight = stage[0].embedding.weight
    assert not weight.grad[0].any() and not weight[0].any() and weight.grad[1:].any()


def test_a_text_without_tokens_is_one_token_of_zeros():
    stage = module(dropout=0.0)
    out = run(stage, torch.zeros(2, 7, dtype=torch.float64))
    assert torch.equal(out, run(stage, torch.zeros(2, 1, dtype=torch.float64)))
    with torch.no_grad():
        _, (h, _) = stage[0].layers[0](torch.zeros(1, 1, 3, dtype=torch.float64))
        _, (h, _) = stage[0].layers[1](h.transpose(0, 1).reshape(1, 1, 8))
    torch.testing.assert_close(out[0], h.transpose(0, 1).flatten())


def test_dropout_is_keyed_and_acts_between_the_layers_only():
    stage, x = module(dropout=0.5), texts()
    before = torch.random.get_rng_state()
    first, again, other = run(stage, x, 1), run(stage, x, 1), run(stage, x, 2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, again) and not torch.equal(first, other)
    torch.testing.assert_close(run(stage, x), stage.eval()(x))
    single = module(dropout=0.5, layers=1)
    torch.testing.assert_close(run(single, x, 1), run(single, x), rtol=1e-12, atol=1e-14)  # nothing in between
    # The masks are the project's own: the second layer sees the first one's outputs times them.
    inner = stage[0]
    ids, tokens = x.long(), int((x > 0).sum())
    packed = nn.utils.rnn.pack_padded_sequence(
        inner.embedding(ids), (ids > 0).sum(1), batch_first=True, enforce_sorted=False
    )
    hidden, _ = inner.layers[0](packed)
    keys = rng.key(rng.key(1, torch.arange(1)), "dropout", "s.0.dropout", 2)
    mask = (rng.uniform(keys, tokens * 8, torch.float64) >= 0.5).view(tokens, 8) * 2.0
    _, (h, _) = inner.layers[1](nn.utils.rnn.PackedSequence(hidden.data * mask, *hidden[1:]))
    torch.testing.assert_close(first, h.transpose(0, 1).flatten(1), rtol=1e-12, atol=1e-12)


def sentences(sizes=(9, 6, 5), length=7) -> Federation:
    """Two kinds of texts, by their first token, with tokens of no meaning behind it."""
    generator = np.random.default_rng(0)
    clients = {}
    for i, size in enumerate(sizes):
        arrays = {}
        for split, count in (("train", size), ("test", 12)):
            y = np.arange(count) % 2
            x = generator.integers(4, 10, (count, length))
            x[:, 0] = 2 + y
            x[np.arange(length) >= generator.integers(1, length + 1, (count, 1))] = 0
            arrays |= {f"x_{split}": x.astype(np.float32), f"y_{split}": y}
        clients[f"c{i}"] = arrays
    return Federation.from_arrays(clients, num_classes=2)


MODEL = Model(body=lstm(**small(fc=(5,))), head=linear(2))


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedavg", "fedrep", "lg-fedavg", "hf-maml"])
def test_clients_run_one_by_one_with_the_same_results_in_every_engine(name):
    ways = [{"engine": "sequential"}, {"engine": "stacked"}, {"plan": Plan("auto", threads=1)}, {"runner": CodecEngine}]
    runs = [train(serve(make(name), sentences(), model=MODEL, **way), 2) for way in ways]
    expected = runs[0].evaluate("test")
    for other in runs[1:]:
        assert difference(other, runs[0]) <= 1e-8
        for client, values in other.evaluate("test").items():
            assert values == pytest.approx(expected[client], rel=1e-8)
    (line,) = [line for line in runs[2].engine.plan.describe() if "at a time" in line]
    assert line == "body.0.layers.0 (LSTM): one client at a time (recurrent layers)"


@pytest.mark.long
def test_hf_maml_differentiates_twice_through_an_lstm():
    runs = [
        train(serve(make("hf-maml", variant=v, alpha=0.5, delta=1e-4), sentences(), model=MODEL), 1)
        for v in ("exact", "hessian-free", "first-order")
    ]
    assert difference(runs[1], runs[0]) < 1e-3 < difference(runs[2], runs[0])


@pytest.mark.long
def test_it_learns_the_meaning_of_a_token():
    method = make("fedavg", optimizer="adam", lr=0.03, local_epochs=4)
    server = train(serve(method, sentences((24, 20)), model=Model(body=lstm(**small(dropout=0.2)), head=linear(2))), 6)
    assert all(values["accuracy"] > 0.9 for values in server.evaluate("test").values())


def test_the_embedding_may_be_frozen():
    server = serve(make("fedavg", placement={"*.embedding.weight": "frozen"}), sentences(), model=MODEL)
    start = server.initialiser.draw_initial((7,), ["body"])
    train(server, 1)
    (group,) = server.engine.cohorts(["c0"], server.initialiser.method.download(server.state))
    for name, tensor in start.items():
        assert torch.equal(group.model[name][0], tensor) == (name == "body.0.embedding.weight")
    assert "body.0.embedding.weight" not in server.state.shared


def test_recurrent_layers_are_reported():
    assert why_not_stackable(module(), (5,), "body") == ("body.0.layers.0 (LSTM)", "recurrent layers")
    gru = nn.Sequential(nn.Flatten(), nn.GRU(5, 2))
    assert why_not_stackable(gru, (5,), "head") == ("head.1 (GRU)", "recurrent layers")


@pytest.mark.parametrize(
    ("x", "number"), [([[1.0, 10.0]], "10"), ([[1.0, -1.0]], "-1"), ([[0.5, 2.0]], "0.5")], ids=["large", "-", "part"]
)
def test_inputs_that_are_no_token_ids_are_one_line(x, number):
    message = rf"^lstm: inputs must be token ids, whole numbers from 0 to vocabulary \+ 1 = 9; found {number}$"
    with pytest.raises(PerfedError, match=message):
        TextLSTM(8, 3, 4, 1, 0.0)(torch.tensor(x))


def test_faulty_models_are_one_line():
    with pytest.raises(PerfedError, match=r"lstm needs token ids \(length,\), got inputs of shape \(1, 4, 4\)"):
        Model(body=lstm()).build((1, 4, 4))
    with pytest.raises(PerfedError, match=r"lstm: vocabulary = 3 is less than the 4 words of the data"):
        Model(body=lstm(3, words=WORDS)).build((5,))
    with pytest.raises(PerfedError, match=r"unknown key 'model.body.words'; allowed: kind, vocabulary, .*vectors$"):
        build_stage("model.body", {"kind": "lstm", "words": ["a"]}, 2, WORDS)
    with pytest.raises(PerfedError, match=r"model.body.fc: must be a list of positive integers \(given: \[0\]\)"):
        build_stage("model.body", {"kind": "lstm", "fc": [0]}, 2)


# Word vectors ------------------------------------------------------------------------------------------------


def text_file(folder, lines=None):
    path = folder / "vectors.txt"
    made = [f"{word} {' '.join(map(str, row))}" for word, row in VECTORS.items()]
    path.write_text("\n".join(made if lines is None else lines) + "\n", encoding="utf-8")
    return path


def npz_file(folder, **change):
    path = folder / "vectors.npz"
    arrays = {"words": np.array(list(VECTORS)), "vectors": np.array(list(VECTORS.values()))}
    np.savez(path, **{key: value for key, value in {**arrays, **change}.items() if value is not None})
    return path


@pytest.mark.parametrize("make_file", [text_file, npz_file])
def test_the_embedding_starts_from_the_vectors_of_a_file(tmp_path, make_file):
    spec = {"kind": "lstm", **small(vectors=str(make_file(tmp_path)))}
    with rng.seed_torch(rng.key(0)):
        weight = build_stage("model.body", spec, 2, WORDS)((5,))[0].embedding.weight
    plain = module()[0].embedding.weight.float()
    assert weight[3].tolist() == VECTORS["late"] and weight[5].tolist() == VECTORS["!"]
    rest = [0, 1, 2, 4, 6, 7, 8, 9]  # padding, unknown, words without a vector, unused
    assert torch.equal(weight[rest], plain[rest])


def test_a_file_is_found_in_the_folder_of_data(tmp_path, monkeypatch):
    text_file(tmp_path)
    monkeypatch.setenv("PERFED_DATA", str(tmp_path))
    found, values = read_vectors("vectors.txt", WORDS, 3)
    assert found.tolist() == [1, 3] and values.tolist() == [VECTORS["late"], VECTORS["!"]]
    with pytest.raises(PerfedError, match=r"^file 'absent.txt' was not found in "):
        read_vectors("absent.txt", WORDS, 3)


TEXT_FAULTS = {
    "another dimension": (["late 1 2"], r"line 1: 2 numbers behind 'late', not dimension = 3"),
    "a short line": (["late 1 2 3", "! 1 2"], r"line 2: 2 numbers behind '!', not dimension = 3"),
    "no number": (["late 1 x 3"], r"line 1: what stands behind 'late' are not all numbers"),
    "infinite": (["late 1 inf 3"], r"the vector of 'late' holds NaN or infinity"),
    "no word": (["other 1 2 3"], r"has vectors for none of the 4 words of the data"),
}


@pytest.mark.parametrize("fault", TEXT_FAULTS)
def test_faulty_text_files_are_one_line(tmp_path, fault):
    lines, message = TEXT_FAULTS[fault]
    with pytest.raises(PerfedError, match=message) as error:
        read_vectors(str(text_file(tmp_path, lines)), WORDS, 3)
    assert "\n" not in str(error.value) and "vectors.txt" in str(error.value)


NPZ_FAULTS = {
    "no vectors": ({"vectors": None}, r"has no array 'vectors'; it holds words"),
    "words of another kind": ({"words": np.arange(3)}, r"'words' is int64 \(3,\), not text"),
    "another shape": ({"vectors": np.zeros((3, 2))}, r"'vectors' is float64 \(3, 2\), not numbers \(3, 3\)"),
    "text for numbers": ({"vectors": np.array([["a"] * 3] * 3)}, r"'vectors' is <U1 \(3, 3\), not numbers"),
    "not finite": ({"vectors": np.full((3, 3), np.nan)}, r"the vector of 'late' holds NaN"),
}


@pytest.mark.parametrize("fault", NPZ_FAULTS)
def test_faulty_npz_files_are_one_line(tmp_path, fault):
    change, message = NPZ_FAULTS[fault]
    with pytest.raises(PerfedError, match=message) as error:
        read_vectors(str(npz_file(tmp_path, **change)), WORDS, 3)
    assert "\n" not in str(error.value)


def test_vectors_need_data_that_say_their_words_and_text_in_utf_8(tmp_path):
    path = text_file(tmp_path)
    with pytest.raises(PerfedError, match="need data that say which words their token ids are"):
        Model(body=lstm(**small(vectors=str(path)))).build((5,))
    path.write_bytes(b"caf\xe9 1 2 3\n")
    with pytest.raises(PerfedError, match="cannot be read as UTF-8 text") as error:
        read_vectors(str(path), WORDS, 3)
    assert "\n" not in str(error.value)
