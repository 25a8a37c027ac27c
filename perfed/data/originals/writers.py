"""LEAF's format: JSON with the samples of each writer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.originals.reading import Files
from perfed.errors import PerfedError

_SIDE = 28
_DIGITS = 10
_SPLITS = ("train", "test")
# The writers of the files in the repository, in the order of perfed's numbers; other writers follow.
_WRITERS = """
f1695_12 f1621_46 f2073_06 f1984_28 f1712_10 f1697_45 f1650_05 f1941_44 f1840_35 f1635_40 f2044_20 f1982_16 f1747_44
f1878_33 f1639_38 f1987_47 f2070_11 f1870_30 f1943_00 f1946_25 f2095_37 f1831_15 f1689_07 f1764_25 f1939_13 f1670_20
f2033_24 f1822_45 f1682_10 f1835_27 f1762_28 f2075_09 f1786_08 f1576_04 f1508_14 f3988_14 f3964_40 f3905_45 f3649_28
f4023_00 f4020_15 f3947_36 f3618_26 f3796_14 f4006_12 f3901_45 f3734_01 f3966_01 f3647_13 f3600_46 f4069_03 f4032_33
f3681_31 f3869_23 f3760_06 f4077_42 f3906_44 f3621_14 f3742_12 f4086_36 f4027_34 f0424_27 f4009_27 f2358_71 f2296_73
f2320_75 f2543_98 f2440_79 f2506_77 f2572_63 f2541_99 f2548_84 f2382_52 f2540_95 f2171_70 f2488_90 f2221_70 f2469_50
f2526_71 f2126_57 f2596_86 f2562_90 f2345_87 f2410_85 f2274_95 f2313_55 f2304_67 f2250_52 f2261_76 f3367_07 f3169_14
f3179_39 f3399_09 f3564_08 f3556_19 f3309_37 f3306_39 f3498_04 f3207_05 f3507_42 f3241_49 f3562_47 f3226_21 f3155_15
f3311_03 f3566_36 f1255_13 f3123_42 f3580_22 f3494_34
"""


def read_femnist62(files: Files) -> dict[str, NDArray[Any]]:
    """Return ``x_*`` ``(n, 28, 28)`` uint8, dark on white, ``y_*`` 0 to 61, ``writer_*`` positions in
    ``writer_name``.
    """
    users: dict[str, dict[str, Any]] = {split: {} for split in _SPLITS}
    for path in files.paths:
        split = next((split for split in _SPLITS if f"_{split}_" in path.name and path.suffix == ".json"), None)
        if split is not None:
            users[split] |= json.loads(path.read_bytes())["user_data"]
    if not all(users.values()):
        raise PerfedError("LEAF's files are all_data_..._train_9.json and all_data_..._test_9.json; some are needed")
    place = {name: number for number, name in enumerate(_WRITERS.split())}
    names = sorted(users["train"], key=lambda name: place.get(name, len(place)))
    arrays: dict[str, NDArray[Any]] = {"writer_name": np.array(names)}
    for split, data in users.items():
        samples = [data.get(name, {"x": [], "y": []}) for name in names]
        pixels = [np.asarray(writer["x"], dtype=np.float64).reshape(-1, _SIDE, _SIDE) for writer in samples]
        labels = [np.asarray(writer["y"], dtype=np.int64) for writer in samples]
        arrays[f"x_{split}"] = np.round(np.concatenate(pixels) * 255).astype(np.uint8)
        arrays[f"y_{split}"] = np.concatenate(labels).astype(np.uint8)
        arrays[f"writer_{split}"] = np.repeat(np.arange(len(names)), [len(writer) for writer in labels]).astype(
            np.int16
        )
    return arrays


def read_femnist_digits(files: Files) -> dict[str, NDArray[Any]]:
    """Return the same as :func:`read_femnist62` for the digits of writers with digits in both splits."""
    characters = read_femnist62(files)
    digit = {split: characters[f"y_{split}"] < _DIGITS for split in _SPLITS}
    writers = set.intersection(*(set(characters[f"writer_{split}"][digit[split]].tolist()) for split in _SPLITS))
    arrays = {"writer_name": characters["writer_name"]}
    for split in _SPLITS:
        selected = digit[split] & np.isin(characters[f"writer_{split}"], sorted(writers))
        arrays |= {f"{part}_{split}": characters[f"{part}_{split}"][selected] for part in ("x", "y", "writer")}
    return arrays
