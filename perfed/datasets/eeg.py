"""Brain-computer interfaces: imagined movements, with a client per person, with common features or with personal
channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfed.data.federation import Federation
from perfed.data.files import load_npz, optional_package, require
from perfed.data.partition.shards import derive_seed, select_test_samples
from perfed.datasets.catalogue import TestFraction, dataset
from perfed.errors import PerfedError

Source = Literal["AlexMI", "BNCI2014_001", "BNCI2014_002", "BNCI2014_004", "Weibo2014", "Zhou2016"]
CLASSES = ("left_hand", "right_hand", "feet", "tongue", "rest")
BAND = (8.0, 30.0)  # Hz


class Recording(NamedTuple):
    """The recording of one person's electrodes.

    Attributes:
        x: ``(trials, channels, times)``, band-passed.
        labels: ``(trials,)`` text, the imagined movement.
        sessions: ``(trials,)`` text, which sorts by time.
    """

    x: NDArray[np.float64]
    labels: NDArray[np.str_]
    sessions: NDArray[np.str_]


@dataset("bci-moabb")
def bci_moabb(
    seed: int,
    data_dir: Path | None,
    *,
    data_sets: list[Source] = ["AlexMI", "BNCI2014_001", "BNCI2014_002", "BNCI2014_004", "Weibo2014", "Zhou2016"],  # noqa: B006 - read only
    test_fraction: TestFraction = 0.25,
) -> Federation:
    """EEG motor imagery of up to 54 people from MOABB's data sets, each with its own channels; needs perfed[bci].

    MOABB downloads the recordings to its folder and filters them to 8 to 30 Hz. Features are Riemannian tangent-space
    vectors of each trial's covariance over the channels of the person: 136 (``AlexMI``), 253, 120, 6, 1830 and 105 in
    the order of ``data_sets``. Classes are left hand, right hand, feet, tongue and rest; other trials are left out.
    Test trials are the trials of the last session; for people with a single session, the fraction ``test_fraction`` of
    each class is drawn. Tangent spaces are fitted on training trials only (by the authors on all trials). The paper's
    N = 40 excludes ``BNCI2014_002``.

    Raises:
        PerfedError: if moabb or pyriemann is not installed, or a person has no trial to train on.

    Source: Rakotomamonjy et al. 2024 (TMLR), sections 5 and S3.2.
    """
    optional_package("pyriemann.estimation", "features of EEG", "bci")
    recordings: dict[str, Recording] = {}
    for source in data_sets:
        recordings |= _download_recordings(source)
    return build_federation(recordings, test_fraction, seed=seed)


def build_federation(recordings: Mapping[str, Recording], test_fraction: float = 0.25, *, seed: int) -> Federation:
    """Return a federation with one client per recording.

    ``notes["data_set"]`` maps client id to its part before the last hyphen.

    Args:
        recordings: the recordings by client id.
        test_fraction: the fraction of test trials of each class, for a recording with a single session.
        seed: the seed of the choice of these trials.

    Raises:
        PerfedError: if a client has no trial of the five classes to train on.
    """
    clients = {id_: extract_features(id_, recording, test_fraction, seed=seed) for id_, recording in recordings.items()}
    names = tuple(name.replace("_", " ") for name in CLASSES)
    federation = Federation.from_arrays(clients, num_classes=len(CLASSES), class_names=names)
    return replace(federation, notes={"data_set": {id_: id_.rpartition("-")[0] for id_ in federation.ids}})


def extract_features(id_: str, recording: Recording, test_fraction: float, *, seed: int) -> dict[str, NDArray[Any]]:
    """Return ``x_train``, ``y_train``, ``x_test``, ``y_test`` of a person.

    The inputs ``x_*`` are ``(trials, channels (channels + 1) / 2)``.

    The covariance of a trial is Ledoit and Wolf's. With M the Riemannian mean of the training trials' covariances, the
    features of C are the entries of ``log(M^-1/2 C M^-1/2)`` on and above the diagonal, those above times sqrt(2).

    Raises:
        PerfedError: if there is no trial of the five classes to train on.

    Source: Barachant et al. 2012, "Multiclass brain-computer interface classification by Riemannian geometry".
    """
    estimation = optional_package("pyriemann.estimation", "features of EEG", "bci")
    tangentspace = optional_package("pyriemann.tangentspace", "features of EEG", "bci")
    is_known_class = np.isin(recording.labels, CLASSES)
    x, labels, sessions = (column[is_known_class] for column in recording)
    y = np.array([CLASSES.index(label) for label in labels], dtype=np.int64)
    if len(np.unique(sessions)) > 1:
        test = sessions == max(sessions.tolist())
    else:
        test = select_test_samples(y, test_fraction, seed=derive_seed(seed, f"bci {id_}"))
    if not (~test).any():
        raise PerfedError(f"bci-moabb: '{id_}' has no trial of {', '.join(CLASSES)} to train on")
    covariances = estimation.Covariances(estimator="lwf").transform(x)
    space = tangentspace.TangentSpace(metric="riemann").fit(covariances[~test])
    vectors = space.transform(covariances).astype(np.float32)
    return {"x_train": vectors[~test], "y_train": y[~test], "x_test": vectors[test], "y_test": y[test]}


def _download_recordings(source: Source) -> dict[str, Recording]:
    """Return the recordings of all people of one of MOABB's data sets, by client id such as "AlexMI-01"."""
    optional_package("moabb", "data set 'bci-moabb'", "bci")
    sets, paradigms = (optional_package(f"moabb.{part}", "EEG", "bci") for part in ("datasets", "paradigms"))
    data_set, paradigm = getattr(sets, source)(), paradigms.MotorImagery(fmin=BAND[0], fmax=BAND[1])
    recordings = {}
    for subject in data_set.subject_list:
        x, labels, metadata = paradigm.get_data(data_set, subjects=[subject])
        sessions = np.array([str(session) for session in metadata["session"]])
        recordings[f"{source.replace('_', '-')}-{subject:02d}"] = Recording(x, np.asarray(labels, dtype=str), sessions)
    return recordings


FILE = "bci_flic_common.npz"
SHORT_NAMES = {
    "Alexandre Motor Imagery": "AlexMI",
    "001-2014": "BNCI2014-001",
    "004-2014": "BNCI2014-004",
    "Weibo 2014": "Weibo2014",
    "Zhou 2016": "Zhou2016",
}


@dataset("bci-common", files=(FILE,))
def bci_common(seed: int, data_dir: Path | None) -> Federation:
    """EEG motor imagery of 40 people from five data sets, six features each ("BCI-common").

    Features are Riemannian tangent-space vectors ``(6,)`` of the channels all data sets have in common, as
    the authors computed them, unscaled. Of the five classes every person has two: left and right hand, or
    right hand and feet. The authors fitted the tangent spaces on test trials too. Client ids are data set and
    subject ("AlexMI-01"); ``notes["data_set"]`` maps client id to data set. The data are fixed: ``seed`` has
    no effect on them.

    Source: Rakotomamonjy et al. 2024 (TMLR), sections 5 and S3.2.
    """
    keys = [f"{part}_{split}" for split in ("train", "test") for part in ("x", "y", "user")]
    data = load_npz(FILE, data_dir, [*keys, "dataset_of_user", "subject_of_user", "class_names"])
    names, subjects = data["dataset_of_user"].tolist(), data["subject_of_user"].tolist()
    require(FILE, len(names) == len(subjects), "'dataset_of_user' and 'subject_of_user' differ in length")
    for split in ("train", "test"):
        kinds = [data[f"{part}_{split}"].dtype.kind for part in ("x", "y", "user")]
        problem = f"'x_{split}' must hold real numbers, 'y_{split}' and 'user_{split}' integers"
        require(FILE, kinds[0] in "fiu" and kinds[1] in "iu" and kinds[2] in "iu", problem)
        lengths = {len(data[f"{part}_{split}"]) for part in ("x", "y", "user")}
        require(FILE, len(lengths) == 1, f"'x_{split}', 'y_{split}' and 'user_{split}' differ in length")
    clients: dict[str, dict[str, Any]] = {}
    for user, (name, subject) in enumerate(zip(names, subjects, strict=True)):
        short = SHORT_NAMES.get(name, name.replace(" ", ""))
        arrays = clients[f"{short}-{subject:02d}"] = {}
        for split in ("train", "test"):
            is_user = data[f"user_{split}"] == user
            arrays[f"x_{split}"] = data[f"x_{split}"][is_user].astype(np.float32)
            arrays[f"y_{split}"] = data[f"y_{split}"][is_user].astype(np.int64)
    class_names = tuple(data["class_names"].tolist())
    federation = Federation.from_arrays(clients, num_classes=len(class_names), class_names=class_names)
    return replace(federation, notes={"data_set": {id_: id_.rpartition("-")[0] for id_ in federation.ids}})
