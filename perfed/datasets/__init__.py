"""Named data sets: :func:`load` one, list them with :func:`dataset_names`, add one with :func:`dataset`."""

from perfed.datasets import (
    adult,
    bci,
    crossmodal,
    digits,
    domain_digits,
    faces,
    heart,
    huggingface,
    images,
    linear,
    parkinsons,
    synthetic,
    tables,
    tweets,
)
from perfed.datasets.catalogue import Data, check_options, dataset, dataset_names, describe, load, located

__all__ = [
    "Data",
    "adult",
    "bci",
    "check_options",
    "crossmodal",
    "dataset",
    "dataset_names",
    "describe",
    "digits",
    "domain_digits",
    "faces",
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
