"""EEG with channels of each data set's own: made recordings, and a stand-in for the package that delivers them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from scipy.linalg import fractional_matrix_power, logm
from sklearn.covariance import ledoit_wolf

from perfed.data.partition.shards import derive_seed, select_test_samples
from perfed.datasets import load
from perfed.datasets.eeg import CLASSES, Recording, build_federation, extract_features
from perfed.errors import PerfedError

LABELS = ("left_hand", "right_hand", "hands")


def recording(channels: int, sessions: int = 1, trials: int = 24, seed: int = 0) -> Recording:
    """Every label has a source that is louder; "hands" is none of the classes."""
    rng = np.random.default_rng([seed, channels])
    mixing, labels = rng.normal(size=(channels, channels)), np.resize(LABELS, trials)
    loud = 1.0 + 2.0 * np.eye(channels)[[LABELS.index(label) for label in labels]]
    x = np.einsum("cd,nd,ndt->nct", 1e-6 * mixing, loud, rng.normal(size=(trials, channels, 200)))
    return Recording(x, labels, np.array([f"{i * sessions // trials}run" for i in range(trials)]))


def tangent(covariances: np.ndarray, training: np.ndarray) -> np.ndarray:
    """By matrix functions: M is where the logarithms of the training matrices add up to 0."""
    mean = training.mean(axis=0)
    for _ in range(50):
        root, inverse = (fractional_matrix_power(mean, power) for power in (0.5, -0.5))
        step = np.mean([logm(inverse @ c @ inverse) for c in training], axis=0)
        values, vectors = np.linalg.eigh(step)
        mean = root @ (vectors * np.exp(values)) @ vectors.T @ root
    inverse = fractional_matrix_power(mean, -0.5)
    rows, columns = np.triu_indices(len(mean))
    scale = np.where(rows == columns, 1.0, np.sqrt(2))
    return np.array([scale * logm(inverse @ c @ inverse)[rows, columns] for c in covariances])


@pytest.mark.long
@pytest.mark.parametrize("sessions", [1, 3])
def test_features_are_tangent_vectors_at_the_mean_of_the_training_trials(sessions):
    made = recording(3, sessions)
    found = extract_features("a", made, 0.25, seed=0)
    known = np.isin(made.labels, CLASSES)
    covariances = np.array([ledoit_wolf(trial.T)[0] for trial in made.x[known]])
    y = np.array([CLASSES.index(label) for label in made.labels[known]])
    test = (
        made.sessions[known] == "2run" if sessions == 3 else select_test_samples(y, 0.25, seed=derive_seed(0, "bci a"))
    )
    assert np.array_equal(found["y_train"], y[~test]) and np.array_equal(found["y_test"], y[test])
    if sessions == 1:
        assert np.bincount(y[test]).tolist() == [2, 2] and np.bincount(y[~test]).tolist() == [6, 6]
    expected = tangent(covariances, covariances[~test])
    np.testing.assert_allclose(found["x_train"], expected[~test], atol=1e-4)
    np.testing.assert_allclose(found["x_test"], expected[test], atol=1e-4)


def test_test_trials_change_nothing_of_the_training_features():
    made = recording(4, sessions=2)
    louder = made._replace(x=np.where((made.sessions == "1run")[:, None, None], 50 * made.x, made.x))
    one, other = (extract_features("a", r, 0.25, seed=0) for r in (made, louder))
    assert np.array_equal(one["x_train"], other["x_train"]) and not np.allclose(one["x_test"], other["x_test"], atol=1)


def test_people_have_features_by_their_channels_and_only_known_classes():
    made = {"Zhou2016-01": recording(5), "Zhou2016-02": recording(5, seed=1), "BNCI2014-004-01": recording(3, 2)}
    federation = build_federation(made, seed=0)
    assert {c.id: c.input_shape for c in federation} == {
        "BNCI2014-004-01": (6,),
        "Zhou2016-01": (15,),
        "Zhou2016-02": (15,),
    }
    assert federation.num_classes == 5 and set(federation.notes["data_set"].values()) == {"Zhou2016", "BNCI2014-004"}
    assert all(len(c.train) + len(c.test) == 16 for c in federation)
    nothing = recording(3)._replace(labels=np.full(24, "hands"))
    with pytest.raises(PerfedError, match="bci-moabb: 'a-1' has no trial of left_hand"):
        build_federation({"a-1": nothing}, seed=0)


def test_what_moabb_delivers_becomes_clients(monkeypatch):
    """A stand-in with the three names that are used; one person's recording per call."""

    class MotorImagery:
        def __init__(self, fmin: float, fmax: float) -> None:
            assert (fmin, fmax) == (8, 30)

        def get_data(self, made, subjects):
            (subject,) = subjects
            one = recording(made.channels, 2, seed=subject)
            return one.x, one.labels, {"session": list(one.sessions)}

    package, sets, paradigms = (ModuleType(f"moabb{end}") for end in ("", ".datasets", ".paradigms"))
    sets.AlexMI = lambda: SimpleNamespace(subject_list=[1, 2], channels=4)
    sets.BNCI2014_004 = lambda: SimpleNamespace(subject_list=[1], channels=3)
    paradigms.MotorImagery = MotorImagery
    for module in (package, sets, paradigms):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    federation = load("bci-moabb", {"data_sets": ["AlexMI", "BNCI2014_004"]}, seed=0)
    assert federation.ids == ["AlexMI-01", "AlexMI-02", "BNCI2014-004-01"]
    assert [c.input_shape for c in federation] == [(10,), (10,), (6,)]
    expected = extract_features("AlexMI-02", recording(4, 2, seed=2), 0.25, seed=0)
    assert np.array_equal(federation.clients[1].train.x.numpy(), expected["x_train"])


@pytest.mark.parametrize("package", ["moabb", "pyriemann.estimation"])
def test_without_the_extra_it_is_said_which(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PerfedError, match=rf"needs the package '{package.partition('.')[0]}'.*\[bci\]"):
        load("bci-moabb", {}, seed=0)
    with pytest.raises(PerfedError, match=r"data.data_sets = \['Physionet'\] is not allowed"):
        load("bci-moabb", {"data_sets": ["Physionet"]}, seed=0)
