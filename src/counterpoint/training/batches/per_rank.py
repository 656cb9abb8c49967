"""Steps to which every process brings samples of its own, as many as it has: counts travel ahead of gradients."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from counterpoint.data.sampler import split_batch
from counterpoint.errors import DataError, PlanError
from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.fabric.fingerprint import format_ranks
from counterpoint.plan.plan import Plan
from counterpoint.program.instruction import Forward
from counterpoint.program.program import Program
from counterpoint.runtime.microbatches import slice_samples
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.training.optimizer_state import apply_group_options, get_group_options


@dataclass(frozen=True, slots=True)
class RankBatchInfo:
    """What one rank brings to a step.

    Args:
        count: its samples.
        is_done: whether it has run out of them.
        settings: the options of its optimizer's groups; empty where all ranks have the same ones and train.
        content: what tells its first batch from others; empty for later ones.
    """

    count: int
    is_done: bool
    optimizer_options: list[dict[str, Any]]
    digest: str


@dataclass(frozen=True, slots=True)
class PerRankBatch:
    """What a rank is fed where each one reads only what it has brought.

    Args:
        batch: this rank's inputs and targets; None where it has none.
        places: for each microbatch of this rank the samples from and to.
        sizes: of every microbatch, those of the others among them.
    """

    batch: tuple[Any, Any] | None
    sample_ranges: Mapping[int, tuple[int, int]]
    sizes: Mapping[int, int]

    def inputs(self, micro: int) -> Any:  # noqa: ANN401 - whatever the model takes
        """Return the model's inputs for a microbatch of this rank."""
        assert self.batch is not None, "only microbatches with samples are asked for"
        return slice_samples(self.batch[0], *self.sample_ranges[micro])

    def targets(self, micro: int) -> Any:  # noqa: ANN401 - whatever the loss takes
        """Return the targets of a microbatch of this rank."""
        assert self.batch is not None, "only microbatches with samples are asked for"
        return slice_samples(self.batch[1], *self.sample_ranges[micro])


class PerRankBatchExchange:
    """What the ranks know of each other's batches.

    Args:
        fabric: the way to the others.
        face: the user's optimizer on this rank.
        uneven: whether ranks may bring different numbers of samples: True, or False for an error; None tells it once.
    """

    def __init__(self, fabric: Fabric, optimizer_spec: OptimizerSpec, *, uneven: bool | None) -> None:
        self.fabric = fabric
        self.optimizer_spec = optimizer_spec
        self.uneven = uneven
        self.microbatches_by_rank: dict[int, tuple[int, ...]] = {}  # by rank, once the program is known
        self.reported: set[str] = set()

    def exchange_info(self, step: int, count: int, *, digest: str = "", is_done: bool = False) -> list[RankBatchInfo]:
        """Return what every rank brings to a step; all ranks call it together.

        Raises:
            DataError: ranks would update with different options.
        """
        groups = [get_group_options(group) for group in self.optimizer_spec.optimizer.param_groups]
        everyone = tuple(range(self.fabric.num_ranks))
        numbers = self.all_gather_ints([count, is_done, int.from_bytes(digest(groups)[:7])], everyone)
        told: Sequence[Any] = [[[], ""]] * len(everyone)
        if (
            not self.microbatches_by_rank
            or any(gone for _, gone, _ in numbers)
            or len({print_ for *_, print_ in numbers}) > 1
        ):
            told = cast("list[Any]", self.fabric.gather_values("batches", [groups, digest], everyone))
        found = [RankBatchInfo(num, bool(gone), *more) for (num, gone, _), more in zip(numbers, told, strict=True)]
        present = [rank for rank in everyone if not found[rank].is_done]
        if present:
            self.sync_optimizer_options(step, found, present)
        return found

    def all_gather_ints(self, mine: Sequence[int], everyone: Group) -> list[list[int]]:
        """Return what every rank passes, whole numbers, as many on each."""
        numbers = torch.zeros(len(everyone) * len(mine), dtype=torch.int64)
        bounds = range(0, len(numbers) + 1, len(mine))
        place = self.fabric.rank
        numbers[bounds[place] : bounds[place + 1]] = torch.tensor(mine)
        self.fabric.all_gather("sizes of batches", numbers, bounds, everyone).wait()
        rows: list[list[int]] = numbers.view(len(everyone), -1).tolist()
        return rows

    def check_batches(self, step: int, infos: Sequence[RankBatchInfo]) -> None:
        """Say once what may be meant: ranks have run out, differ in their numbers of samples, or bring the same ones.

        Raises:
            DataError: they differ, and that is refused.
        """
        present = [rank for rank in self.microbatches_by_rank if not infos[rank].is_done]
        gone = [rank for rank in self.microbatches_by_rank if infos[rank].is_done]
        if gone and present:
            self.report_uneven(
                "ends",
                f"{format_ranks(gone)} had no more samples for step {step}, to which {format_ranks(present)} brought some",
                "the step is made of the samples there are, each counting alike",
            )
        self.check_counts(step, infos, present)
        self.check_duplicates(infos, present)

    def sync_optimizer_options(self, step: int, infos: Sequence[RankBatchInfo], present: Sequence[int]) -> None:
        """Have the optimizer's options of the ranks that train, which must agree; one that has run out takes them over.

        Raises:
            DataError: they do not agree.
        """
        first = present[0]
        for rank in present[1:]:
            pairs = zip(infos[first].optimizer_options, infos[rank].optimizer_options, strict=True)
            for index, (mine, theirs) in enumerate(pairs):
                for key in [key for key in mine if mine[key] != theirs.get(key)]:
                    raise DataError(
                        f"in step {step} the optimizer's {key} of group {index} is {mine[key]} on rank {first}, "
                        f"{theirs.get(key)} on rank {rank}, but ranks update one model; change it alike on all ranks: "
                        f"step a schedule until its last_epoch is step.number, which is {step} on all"
                    )
        if self.fabric.rank not in present:  # and so all were told
            for group, options in zip(
                self.optimizer_spec.optimizer.param_groups, infos[first].optimizer_options, strict=True
            ):
                apply_group_options(group, options)

    def check_counts(self, step: int, infos: Sequence[RankBatchInfo], present: Sequence[int]) -> None:
        """Tell of ranks with batches of different sizes."""
        counts = {rank: infos[rank].count for rank in present}
        if len(set(counts.values())) > 1:
            told = ", ".join(
                f"{count} on {format_ranks([rank for rank in present if counts[rank] == count])}"
                for count in dict.fromkeys(counts.values())
            )
            self.report_uneven(
                "counts",
                f"the ranks' batches differ in size in step {step}: {told}",
                f"each of the {sum(counts.values())} samples counts alike in the gradient, not each rank",
            )

    def check_duplicates(self, infos: Sequence[RankBatchInfo], present: Sequence[int]) -> None:
        """Warn of ranks that have all brought the same first batch, which a sampler should have parted."""
        alike = {infos[rank].digest for rank in present}
        replicas = {self.microbatches_by_rank[rank] for rank in present}
        if len(alike) == 1 and alike != {""} and len(replicas) > 1 and self.fabric.rank == 0:
            warnings.warn(
                f"{format_ranks(present)} brought the same {infos[present[0]].count} samples to the first step, so that each "
                "sample is computed more than once; shard them with a DistributedSampler, or pass batches='global' and "
                "leave the sharding to the step",
                stacklevel=5,
            )

    def report_uneven(self, kind: str, description: str, rule: str) -> None:
        """Say once that ranks are uneven, or refuse it.

        Raises:
            DataError: it is to be refused.
        """
        if self.uneven is False:
            raise DataError(
                f"{description}, which uneven=False refuses; give all ranks as many samples (drop_last=True, or a sampler "
                "that pads), or pass uneven=True"
            )
        if self.uneven is None and kind not in self.reported and self.fabric.rank == 0:
            warnings.warn(
                f"{description}; {rule}: pass uneven=True where that is meant, or uneven=False to have it refused",
                stacklevel=6,
            )
        self.reported.add(kind)

    def set_program(self, program: Program) -> None:
        """The microbatches of every rank are known.

        Raises:
            DataError: two ranks share some of them, but not all, so that neither can bring its own.
        """
        rows = enumerate(program.rank_programs)
        self.microbatches_by_rank = {
            rank: micros
            for rank, row in rows
            if (micros := tuple(sorted({word.micro for word in row.body if isinstance(word, Forward)})))
        }
        for one in set(self.microbatches_by_rank.values()):
            for other in set(self.microbatches_by_rank.values()) - {one}:
                if not set(one).isdisjoint(other):
                    raise DataError(
                        f"a rank of this plan runs microbatches {one}, another one {other}, so that no batch belongs "
                        "to either; pass batches='global', the whole batch on every rank"
                    )

    def make_batch(self, batch: tuple[Any, Any] | None, infos: Sequence[RankBatchInfo]) -> PerRankBatch:
        """Return what this rank is fed.

        Args:
            batch: what it has brought; None for nothing.
            found: what all have brought.

        Raises:
            DataError: ranks that compute parts of one replica have not brought the same.
        """
        sizes: dict[int, int] = {}
        places: dict[int, tuple[int, int]] = {}
        for rank, micros in self.microbatches_by_rank.items():
            cuts = dict(zip(micros, split_batch(infos[rank].count, len(micros)), strict=True))
            self.require_same_replica_batch(self.replica_ranks(micros), infos)
            sizes |= {micro: stop - start for micro, (start, stop) in cuts.items()}
            if rank == self.fabric.rank:
                places = cuts
        return PerRankBatch(batch, places, sizes)

    def replica_ranks(self, microbatches: tuple[int, ...]) -> Group:
        """Return the ranks that compute together on some microbatches."""
        return tuple(rank for rank, own in self.microbatches_by_rank.items() if own == microbatches)

    def require_same_replica_batch(self, members: Group, infos: Sequence[RankBatchInfo]) -> None:
        """Check that the ranks of one replica have brought the same.

        Raises:
            DataError: they have not.
        """
        offers = [(infos[rank].count, infos[rank].digest) for rank in members]
        if len(set(offers)) > 1:
            raise DataError(
                f"{format_ranks(members)} compute together on one batch, but brought "
                f"{', '.join(f'{count} samples' for count, _ in offers)}, not the same ones; shard the samples by "
                "replica: the ranks of one replica pass one batch"
            )


def require_synchronous_steps(plan: Plan, num_measured_plans: int = 0) -> None:
    """Check that a step ends what it begins, so that what each rank brings to it is used in it.

    Args:
        plan: who does what.
        measure: how many plans are to be measured before the first step.

    Raises:
        PlanError: batches are under way over several steps, or plans are measured, which takes one batch for all.
    """
    if num_measured_plans:
        raise PlanError(
            f"measure={num_measured_plans} has plans train on the first batch, which all ranks must have, but batches='per_rank' has "
            "each rank bring samples of its own; pass batches='global', or leave measure out"
        )
    for strategy in plan.strategies:
        if isinstance(strategy, Pipeline) and strategy.is_async:
            raise PlanError(
                f"batches='per_rank' has each rank bring samples of its own to a step, but under {strategy} all stages work "
                "on every batch, and take several steps for it; pass batches='global', the whole batch on every rank, or "
                "take schedule=one_f_one_b"
            )
