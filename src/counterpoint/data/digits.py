"""scikit-learn's handwritten digits: 1797 images of 8 x 8 pixels, without a download."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from counterpoint.data.sampler import Indices
from counterpoint.data.sources import DatasetSplit
from counterpoint.errors import DataError

HELD_OUT_ONE_IN = 5
MEAN, STD = 4.884, 6.017
FILE = "datasets/data/digits.csv.gz"  # in scikit-learn; a line is 64 pixels and the digit


class Digits:
    """Images of handwritten digits and their labels.

    A sample is ``(image, digit)``: the image ``(1, 8, 8)`` in ``dtype`` with mean 0 and deviation 1 over the
    dataset, the digit an int64 scalar from 0 to 9. Every fifth image is held out. It is deterministic.

    Args:
        part: ``"train"`` for 1438 images, ``"held-out"`` for the 359 others.
        dtype: a floating point type.

    Raises:
        DataError: there is no such split, ``dtype`` is not floating point, or scikit-learn is not installed.
    """

    def __init__(self, split: DatasetSplit = "train", dtype: torch.dtype = torch.float32) -> None:
        if split not in ("train", "held-out"):
            raise DataError(f"the digits have no split {split!r}; give train or held-out")
        if not dtype.is_floating_point:
            raise DataError(f"dtype is {dtype}; normalized images need a floating point type")
        pixels, digits = _load()
        held_out = np.arange(len(digits)) % HELD_OUT_ONE_IN == HELD_OUT_ONE_IN - 1
        chosen = held_out if split == "held-out" else ~held_out
        images = torch.from_numpy((pixels[chosen] - MEAN) / STD)
        self._images = images.reshape(-1, 1, 8, 8).to(dtype)
        self._digits = torch.from_numpy(digits[chosen]).long()

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._digits)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return ``(image, digit)``, ``(1, 8, 8)`` and ``()``."""
        return self._images[index], self._digits[index]

    def fetch(self, indices: Sequence[int] | Indices) -> tuple[Tensor, Tensor]:
        """Return many samples: images ``(image, 1, 8, 8)`` and digits ``(image,)``."""
        samples = torch.as_tensor(np.asarray(indices, dtype=np.int64))
        return self._images[samples], self._digits[samples]


def split_digits(dtype: torch.dtype = torch.float32) -> tuple[Digits, Digits]:
    """Return the training and the held-out split, which have no image in common."""
    return Digits("train", dtype), Digits("held-out", dtype)


def _load() -> tuple[np.ndarray, np.ndarray]:
    """Return pixels ``(image, 64)`` from 0 to 16 and digits ``(image,)``.

    They are read from scikit-learn's file, because importing scikit-learn and SciPy takes more than a second per rank.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None:
        raise DataError("the digits are part of scikit-learn, which is not installed; pip install counterpoint[data]")
    places = (Path(folder, FILE) for folder in found.submodule_search_locations or ())
    path = next(filter(Path.is_file, places), None)
    if path is None:  # other versions of scikit-learn may have it elsewhere
        pixels, digits = importlib.import_module("sklearn.datasets").load_digits(return_X_y=True)
        return np.asarray(pixels, dtype=np.float64), np.asarray(digits, dtype=np.int64)
    table = np.loadtxt(path, delimiter=",")
    return table[:, :-1], table[:, -1].astype(np.int64)
