"""Named data sets: :func:`load` one, list them with :func:`dataset_names`, add one with :func:`dataset`."""

from perfed.datasets import bci, digits, huggingface, images, linear, synthetic
from perfed.datasets.catalogue import check_options, dataset, dataset_names, describe, load

__all__ = [
    "bci",
    "check_options",
    "dataset",
    "dataset_names",
    "describe",
    "digits",
    "huggingface",
    "images",
    "linear",
    "load",
    "synthetic",
]
