"""Random numbers of a dataset, keyed by the sample: whoever reads it, and after whatever, it is drawn the same.

Python, numpy and torch keep one global generator each. Before a sample is read all three are set to a key of
(seed, epoch, sample), and afterwards they go on as if nothing had been read.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.random import mtrand

from counterpoint.data.sampler import sample_key


@contextmanager
def kept_generators() -> Iterator[None]:
    """Whatever is drawn inside, the global generators are afterwards as they were."""
    ours, theirs = random.getstate(), torch.default_generator.get_state()
    numbers = mtrand.get_bit_generator()
    mtrand.set_bit_generator(np.random.MT19937(0))  # taking it away and giving it back is faster than its state
    try:
        yield
    finally:
        mtrand.set_bit_generator(numbers)
        torch.default_generator.set_state(theirs)
        random.setstate(ours)


def set_generators(seed: int, epoch: int, sample: int) -> None:
    """What is drawn next from the global generators depends on nothing else."""
    key = sample_key(seed, epoch, sample)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


def has_drawn(seed: int, epoch: int, sample: int) -> bool:
    """Tell whether anything was drawn since ``set_generators`` with the same arguments."""
    found = random.getstate(), torch.default_generator.get_state(), np.random.random()
    set_generators(seed, epoch, sample)
    python, torchs, numpys = random.getstate(), torch.default_generator.get_state(), np.random.random()
    return found[0] != python or not torch.equal(found[1], torchs) or found[2] != numpys
