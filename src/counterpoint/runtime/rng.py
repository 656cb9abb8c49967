"""Random numbers keyed by name: every draw depends on (seed, step, microbatch, module), never on a rank."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import torch

from counterpoint.partitioning.seed_hooks import no_seed

_MASK = (1 << 63) - 1


def hash_seed(*parts: int) -> int:
    """Return one 63-bit number that depends on all parts and on their order."""
    state = 0x243F6A8885A308D3
    for part in parts:
        state = (state ^ (part & 0xFFFFFFFFFFFFFFFF)) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 29
        state = state * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 32
    return state & _MASK


class ModuleRNG:
    """Random state of one rank: holds the step and microbatch; calling it seeds torch for one module.

    Args:
        seed: the run's seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0
        self.micro = 0
        self.path_hashes: dict[str, int] = {}

    def __call__(self, path: str) -> None:
        """Seed torch's generator for the call of the module at ``path``."""
        name = self.path_hashes.get(path)
        if name is None:
            name = self.path_hashes[path] = crc32(path.encode())
        torch.default_generator.manual_seed(hash_seed(self.seed, self.step, self.micro, name))


def make_seeder(rng: ModuleRNG, *, uses_rng: bool) -> Callable[[str], None]:
    """Return what a segment calls before each module that may draw random numbers."""
    return rng if uses_rng else no_seed
