"""Brain-computer interfaces: imagined movements from EEG, one client per person."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from perfed.data.federation import Federation
from perfed.data.files import load_npz, require
from perfed.datasets.catalogue import dataset

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
            own = data[f"user_{split}"] == user
            arrays[f"x_{split}"] = data[f"x_{split}"][own].astype(np.float32)
            arrays[f"y_{split}"] = data[f"y_{split}"][own].astype(np.int64)
    class_names = tuple(data["class_names"].tolist())
    federation = Federation.from_arrays(clients, num_classes=len(class_names), class_names=class_names)
    return replace(federation, notes={"data_set": {id_: id_.rpartition("-")[0] for id_ in federation.ids}})
