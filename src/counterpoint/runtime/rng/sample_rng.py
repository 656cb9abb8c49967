"""Random numbers keyed by sample: every draw depends on (seed, step, sample, module call, number of the draw).

Neither microbatches nor ranks nor stages are part of that key, so they change no number. Where a forward runs again in
a backward, as under ``torch.utils.checkpoint``, it must find the module calls of its first run again. They are found
by torch's own generator, which the checkpoint restores: it is seeded with another number before and after each draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from counterpoint.device.accelerator import Accelerator
from counterpoint.runtime.kernels.philox import philox_select, philox_words
from counterpoint.runtime.rng.draw_sites import DrawSite, DrawSites, loss_batch_dim, may_have_samples
from counterpoint.runtime.rng.random_functions import random_functions
from counterpoint.terminal_text import warn

_MASK = (1 << 63) - 1
LOSS = "(loss)"
"""In place of the path of a module: the draws of the loss function."""


def hash_seed(*parts: int) -> int:
    """Return one 63-bit number that depends on all parts and on their order."""
    state = 0x243F6A8885A308D3
    for part in parts:
        state = (state ^ (part & 0xFFFFFFFFFFFFFFFF)) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 29
        state = state * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 32
    return state & _MASK


class SampleRange(NamedTuple):
    """The samples of a microbatch: consecutive ones of a global batch.

    Args:
        first: position of the first one in the batch.
        size: how many.
        batch_size: of the whole batch.
    """

    first: int = 0
    size: int = 1
    batch_size: int = 1


class Draw(NamedTuple):
    """Which numbers a draw has.

    Args:
        key: of Philox, which depends on seed, step, module call and number of the draw.
        batch_dim: the dim along which the samples are.
        samples: along that dim; one for what is not by sample.
    """

    key: int
    batch_dim: int
    samples: SampleRange

    def select(self, shape: Sequence[int], p: float, value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor whose elements are 0 with probability ``p``, else ``value``."""
        out = torch.empty(_move_first(shape, self.batch_dim), dtype=dtype, device=device)
        rows = out.view(self.samples.size, math.prod(shape) // self.samples.size)
        philox_select(rows, self.key, self.samples.first, p, value)
        return out.movedim(0, self.batch_dim) if self.batch_dim else out

    def words(self, shape: Sequence[int], device: torch.device, per_entry: int = 0) -> Tensor:
        """Return whole numbers, uniform in ``[0, 2**32)``, ``per_entry`` for each entry along one more dim."""
        width = math.prod(shape) // self.samples.size * max(per_entry, 1)
        order = (*_move_first(shape, self.batch_dim), *filter(None, [per_entry]))
        out = philox_words(self.key, self.samples.first, self.samples.size, width, device).view(order)
        return out.movedim(0, self.batch_dim) if self.batch_dim else out


@dataclass(slots=True)
class CallLog:
    """The module calls of one step that have drawn, to find them again in a backward.

    Args:
        sites: the next draw, by the number that torch's generator was seeded with.
        next_paths: the next module call, likewise.
    """

    sites: dict[int, DrawSite] = field(default_factory=dict)
    next_paths: dict[int, str] = field(default_factory=dict)


class SampleRNG:
    """Random numbers of one rank; calling it begins the call of the module at a path.

    Args:
        seed: the run's seed.
        accelerator: that modules compute on; None for the host.
        sites: what is known of the model's draws; others are keyed by microbatch, and a warning names their module.
            None if it does not matter which numbers are drawn.
    """

    def __init__(self, seed: int, accelerator: Accelerator | None = None, sites: DrawSites | None = None) -> None:
        self.seed = seed
        self.seed_device = None if accelerator is None or accelerator.is_host else accelerator.manual_seed
        self.batch_dims = sites.batch_dims if sites else {}
        self.step = 0
        self.micro = 0
        self.samples = SampleRange()
        self.site = DrawSite("", 0)
        self.loss_seeds = False
        self.checks_loss = False  # whether draws of the loss whose samples are unknown are refused
        self.step_key = self.microbatch_key = 0
        self._keyed: tuple[int, int] | None = None  # the step and the first sample of these keys
        self.site_keys: dict[DrawSite, int] = {}
        self.log = CallLog()
        self.logs: dict[int, CallLog] = {}
        self.warned = set(sites.unkeyed) if sites and sites.batch_dims else None
        self.functions = random_functions(self)

    def begin_step(self, step: int) -> None:
        """Begin a step; those before it have ended."""
        self.step, self.micro = step, 0
        self.logs = {number: log for number, log in self.logs.items() if number >= step}

    def begin_microbatch(self, step: int, micro: int, samples: SampleRange) -> None:
        """Let the next draws be for these samples of a step's batch."""
        self.step, self.micro, self.samples = step, micro, samples
        if self._keyed != (step, samples.first):  # a backward has the keys of its forward
            self._keyed = step, samples.first
            self.step_key = hash_seed(self.seed, step)
            self.microbatch_key = hash_seed(self.step_key, samples.first)
        self.log = self.logs.setdefault(step, CallLog())

    def __call__(self, path: str) -> None:
        """Begin the call of the module at ``path``."""
        if _is_in_backward():
            path = self.log.next_paths.get(torch.initial_seed(), path)
        else:
            self.log.next_paths[torch.initial_seed()] = path
        number = self._seed_generator(DrawSite(path, 0))
        if self.seed_device is not None:
            self.seed_device(number)

    def begin_loss(self, *, seeds: bool) -> None:
        """Let the next draws be those of the loss function.

        Args:
            seeds: whether torch's generator is seeded for each draw, as it is for those of a model that draws; else it
                is the user's.
        """
        self.site, self.loss_seeds = DrawSite(LOSS, 0), seeds
        if seeds:
            self._seed_generator(self.site)

    def select(self, shape: Sequence[int], p: float, value: float, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor whose elements are 0 with probability ``p``, else ``value``."""
        return self._next_draw(shape).select(shape, p, value, dtype, like.device)

    def words(
        self, shape: Sequence[int], device: torch.device, like: Tensor | None = None, *, per_entry: int = 0
    ) -> Tensor:
        """Return whole numbers, uniform in ``[0, 2**32)``."""
        del like
        return self._next_draw(shape).words(shape, device, per_entry)

    def sites_of(self, calls: Sequence[str] | None) -> tuple[DrawSite, ...]:
        """Return the sites that are known in some module calls, in their order; None for all calls of a forward."""
        if calls is None:
            return tuple(self.batch_dims)
        return tuple(site for call in calls for site in self.batch_dims if site.path == call)

    def list_draws(self, sites: Sequence[DrawSite]) -> list[Draw]:
        """Return what these sites, whose batch dims are known, draw for the current samples."""
        draws = []
        for site in sites:
            batch_dim, key = self.batch_dims[site], self.step_key ^ self._site_key(site)
            draws.append(Draw(key, 0, SampleRange()) if batch_dim is None else Draw(key, batch_dim, self.samples))
        return draws

    def _next_draw(self, shape: Sequence[int]) -> Draw:
        """Return what is drawn next."""
        site, samples = self.site, self.samples
        if _is_in_backward():
            site = self.log.sites.get(torch.initial_seed(), site)
        following = DrawSite(site.path, site.number + 1)
        batch_dim: int | None
        if site.path == LOSS:
            batch_dim = loss_batch_dim(shape, samples.size)
            if batch_dim is None and not self.checks_loss and may_have_samples(shape, samples.size):
                batch_dim = _UNKNOWN
        else:
            batch_dim = self.batch_dims.get(site, _UNKNOWN)
        if site.path != LOSS or self.loss_seeds:
            self._seed_generator(following)
        else:
            self.site = following
        key = self.step_key ^ self._site_key(site)
        if batch_dim is None:
            return Draw(key, 0, SampleRange())
        if batch_dim == _UNKNOWN or batch_dim >= len(shape) or shape[batch_dim] % samples.size:
            self._warn_unkeyed(site.path, shape)
            return Draw(key, 0, SampleRange(samples.first))
        return Draw(key, batch_dim, samples)

    def _seed_generator(self, site: DrawSite) -> int:
        """Seed torch's generator for this draw, should it come from there; return the number."""
        number = self.microbatch_key ^ self._site_key(site)
        torch.default_generator.manual_seed(number)
        self.site = self.log.sites[number] = site
        return number

    def _site_key(self, site: DrawSite) -> int:
        key = self.site_keys.get(site)
        if key is None:
            key = self.site_keys[site] = hash_seed(crc32(site.path.encode()), site.number)
        return key

    def _warn_unkeyed(self, path: str, shape: Sequence[int]) -> None:
        """Warn once of draws of a module call that are keyed by microbatch, if the batch has several."""
        if self.warned is None or path in self.warned or self.samples.size == self.samples.batch_size:
            return
        self.warned.add(path)
        if path == LOSS:
            location, remedy = (
                "the loss",
                "draw one entry for each sample along dim 0, as torch.randn_like(targets) does",
            )
        else:
            location = f"module '{path.partition('#')[0]}'"
            remedy = "draw in every forward what the forward of the first batch drew, one entry for each sample"
        warn(
            f"{location} draws random numbers of the shape {tuple(shape)} for {self.samples.size} of the batch's "
            f"{self.samples.batch_size} samples, and which of them belong to which sample is unknown, so another plan "
            f"or number of microbatches draws others; {remedy}",
            stacklevel=2,
        )


_UNKNOWN = -1


def _move_first(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (shape[dim], *shape[:dim], *shape[dim + 1 :]) if dim else tuple(shape)


def _is_in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001 - it has no public name
