"""A model made ready to be timed as the runtime runs it: as it is, in one call, and piece by piece."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from counterpoint.compiler.compile import compile  # noqa: A004 - read as cp.compile
from counterpoint.cutting.choose import cut_model
from counterpoint.cutting.cut import Cut
from counterpoint.cutting.eager import num_samples
from counterpoint.fabric.local import LocalWorld
from counterpoint.model.spec import Block, ModelSpec
from counterpoint.plan import Plan
from counterpoint.program.instruction import Backward, Forward, Instruction
from counterpoint.runtime.build import Parts, bind, build_rank, call_form
from counterpoint.runtime.compute import Compute
from counterpoint.runtime.deferred import kept_of
from counterpoint.runtime.feed import BatchFeed
from counterpoint.runtime.interpreter import Interpreter
from counterpoint.runtime.later import Desk
from counterpoint.runtime.norm_rules import norms_for
from counterpoint.runtime.optimizers import Face
from counterpoint.runtime.vote import Guard

Loss = Callable[[Any, Any], Tensor]

NUM_MICROS = 2
"""Microbatches of a step: the gradient of the second one is added to that of the first."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is timed.

    Args:
        model: it stays as it is.
        cut: the same model in pieces.
        spec: these pieces, with the parameters that are trained.
        loss: from the model's output and the targets to the mean loss.
        face: the user's optimizer.
        batch: inputs and targets of some samples.
    """

    model: nn.Module
    cut: Cut
    spec: ModelSpec
    loss: Loss
    face: Face
    batch: tuple[Any, Any]

    def feed(self, samples: int, num_micros: int = NUM_MICROS) -> BatchFeed:
        """Return microbatches of so many samples: those there are, again and again where they are too few."""
        count = num_samples(self.batch[0])
        rows = torch.arange(samples * num_micros) % count

        def resized(leaf: Any) -> Any:  # noqa: ANN401 - whatever is in a nest
            has_samples = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == count
            return leaf[rows.to(leaf.device)].contiguous() if has_samples else leaf

        inputs, targets = (tree_map(resized, part) for part in self.batch)
        return BatchFeed((inputs, targets), tuple((at * samples, (at + 1) * samples) for at in range(num_micros)))

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(self.model.parameters()).device


@dataclass(frozen=True, slots=True)
class Bench:
    """A subject on one rank, twice: as it is, and in pieces.

    Args:
        whole: the rank that calls the model as it is.
        alone: the same where a step has one microbatch; the same rank where batch norm keeps nothing.
        pieces: the rank that has it in pieces, all of which are one call.
        apart: what it computes with where every piece is a call of its own.
        parts: the same where backwards are done in two parts.
    """

    whole: Interpreter
    alone: Interpreter
    pieces: Interpreter
    apart: Compute
    parts: Compute

    @property
    def num_pieces(self) -> int:
        """How many pieces there are."""
        return len(self.apart.by_first)


def set_up(subject: Subject, samples: int) -> Bench:
    """Return the subject on one rank; the model of the subject is not touched.

    Args:
        subject: what is timed.
        samples: in its microbatches.
    """
    whole = alone = _as_it_is(subject, samples, NUM_MICROS)
    if kept_of(subject.model):
        alone = _as_it_is(subject, samples, 1)
    blocks = tuple(Block((piece,), index) for index, piece in enumerate(subject.spec.pieces))
    pieces, parts = _interpreter(
        subject, subject.cut, replace(subject.spec, blocks=blocks, heads=()), subject.model, NUM_MICROS
    )
    model = bind(parts, subject.cut, _each_alone(len(blocks)), training=True)
    apart, in_parts = (Compute(model, pieces.store, pieces.dice, desk) for desk in (None, Desk()))
    apart.norms = in_parts.norms = pieces.compute.norms
    return Bench(whole, alone, pieces, apart, in_parts)


def _as_it_is(subject: Subject, samples: int, num_micros: int) -> Interpreter:
    """Return a rank that calls the model as it is, with a copy of its own."""
    own = copy.deepcopy(subject.model)
    cut = cut_model(own, call_form(subject.feed(samples, 1).inputs(0)), need="none")
    return _interpreter(subject, cut, replace(cut.spec, params=subject.spec.params), own, num_micros)[0]


def _interpreter(
    subject: Subject, cut: Cut, spec: ModelSpec, model: nn.Module, num_micros: int
) -> tuple[Interpreter, Parts]:
    compiled = compile(Plan((), num_micros), spec)
    parts = Parts(compiled.turns, compiled.model, subject.loss, subject.face, Guard(), 0)
    rank = build_rank(parts, cut, model, LocalWorld(1).fabrics[0])
    rank.interpreter.compute.norms = norms_for(parts, model, rank.interpreter, None)
    rank.interpreter.compute.unused = "zero"
    return rank.interpreter, parts


def _each_alone(num_blocks: int) -> Sequence[Instruction]:
    """Return words in which no two blocks stand side by side, so that each is a function of its own."""
    return [word for block in range(num_blocks) for word in (Forward(block, 0), Backward(block, 0))]


def storages(values: Any) -> dict[int, int]:  # noqa: ANN401 - any nest of tensors
    """Return the memory that tensors lie in, by its identity, with its bytes; tensors may be without values."""
    found = (leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and not leaf.is_sparse)
    return {StorageWeakRef(storage).cdata: storage.nbytes() for storage in found}  # type: ignore[no-untyped-call]
