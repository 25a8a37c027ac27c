"""Anything with tensors in it as bytes and numpy arrays, which Ray moves without copying."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ray.cloudpickle import CloudPickler
from torch import Tensor

Parcel = tuple[bytes, list[NDArray[np.uint8]]]
"""A pickle, and the memory of the tensors in it."""


class _Pickler(CloudPickler):  # type: ignore[misc]
    """Takes tensors for what is seen of them, whatever storage they are views of."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor:
            return super().reducer_override(obj)
        flat = obj.detach().cpu().contiguous().flatten().view(torch.uint8)  # numpy has no bfloat16
        return _restored, (flat.numpy(), obj.dtype, tuple(obj.shape), obj.device.type)


def _restored(flat: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...], kind: str) -> Tensor:
    if flat.size == 0:
        return torch.empty(shape, dtype=dtype, device=kind)
    return torch.from_numpy(flat).view(dtype).view(shape).to(kind)


def pack(content: Any) -> Parcel:
    """``content`` with its tensors apart; they still share its memory."""
    found: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=found.append).dump(content)
    return stream.getvalue(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in found]


def unpack(parcel: Parcel, *, copy: bool) -> Any:
    """What was packed; tensors of which no ``copy`` was made must not be written to, and keep the parcel alive."""
    data, buffers = parcel
    return pickle.loads(data, buffers=[_aligned(buffer) for buffer in buffers] if copy else buffers)


def _aligned(buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy where torch would have put it: the last digits may depend on where a tensor begins."""
    made = torch.empty(buffer.size, dtype=torch.uint8).numpy()
    made[:] = buffer
    return made


def size(parcel: Parcel) -> int:
    """Bytes of all its buffers together."""
    return len(parcel[0]) + sum(buffer.nbytes for buffer in parcel[1])
