"""Random numbers keyed by name: every draw depends on (seed, step, microbatch, module), never on a rank."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import torch

from counterpoint.partitioning.seed_hooks import no_seed
from counterpoint.runtime.devices import CPU, device_seeder

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
        device: that modules draw on; the CPU's generator is always seeded.
    """

    def __init__(self, seed: int, device: torch.device = CPU) -> None:
        self.seed = seed
        self.seed_device = device_seeder(device)
        self.step = 0
        self.micro = 0
        self.path_hashes: dict[str, int] = {}

    def begin_microbatch(self, step: int, micro: int) -> None:
        """Let the next draws depend on this step and microbatch."""
        self.step, self.micro = step, micro

    def __call__(self, path: str) -> None:
        """Seed torch's generators for the call of the module at ``path``."""
        name = self.path_hashes.get(path)
        if name is None:
            name = self.path_hashes[path] = crc32(path.encode())
        number = hash_seed(self.seed, self.step, self.micro, name)
        torch.default_generator.manual_seed(number)
        if self.seed_device is not None:
            self.seed_device(number)


def make_seeder(rng: ModuleRNG, *, uses_rng: bool) -> Callable[[str], None]:
    """Return what a segment calls before each module that may draw random numbers."""
    return rng if uses_rng else no_seed
