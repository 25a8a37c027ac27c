"""Named data sets: :func:`load` one, list them with :func:`dataset_names`, add one with :func:`dataset`."""

from perfed.datasets import (
    adult,
    crossmodal,
    digits,
    eeg,
    faces,
    flamby,
    heart,
    huggingface,
    images,
    linear,
    parkinsons,
    synthetic,
    tables,
    tweets,
)
from perfed.datasets.catalogue import Data, check_options, dataset, dataset_id, dataset_names, describe, load, located

__all__ = [
    "Data",
    "adult",
    "check_options",
    "crossmodal",
    "dataset",
    "dataset_id",
    "dataset_names",
    "describe",
    "digits",
    "eeg",
    "faces",
    "flamby",
    "heart",
    "huggingface",
    "images",
    "linear",
    "load",
    "located",
    "parkinsons",
    "synthetic",
    "tables",
    "tweets",
]
