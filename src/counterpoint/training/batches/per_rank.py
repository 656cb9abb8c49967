"""Steps to which every process brings its own samples, as many as it has: sizes are exchanged before the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from counterpoint.data.sampler import split_batch
from counterpoint.errors import DataError, PlanError
from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.fabric.fingerprint import digest, format_ranks
from counterpoint.plan.plan import Plan
from counterpoint.program.instruction import Forward
from counterpoint.program.program import Program
from counterpoint.runtime.microbatches import slice_samples
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.terminal_text import warn
from counterpoint.training.optimizer_state import apply_group_options, get_group_options


@dataclass(frozen=True, slots=True)
class RankBatchInfo:
    """What one rank brings to a step.

    Args:
        count: the number of its samples.
        is_done: whether it has run out of them.
        optimizer_options: the options of its optimizer's groups; empty if all ranks have the same ones and train.
        digest: identifies the content of its first batch; empty for later ones.
    """

    count: int
    is_done: bool
    optimizer_options: list[dict[str, Any]]
    digest: str


@dataclass(frozen=True, slots=True)
class PerRankBatch:
    """The microbatches of a rank that reads only its own samples.

    Args:
        batch: this rank's inputs and targets; None if it has none.
        sample_ranges: for each microbatch of this rank the first sample and the one after the last.
        sizes: of every microbatch, those of other ranks too.
    """

    batch: tuple[Any, Any] | None
    sample_ranges: Mapping[int, tuple[int, int]]
    sizes: Mapping[int, int]

    def inputs(self, micro: int) -> Any:  # noqa: ANN401 - whatever the model takes
        """Return the model's inputs for a microbatch of this rank."""
        assert self.batch is not None, "only microbatches with samples are read"
        return slice_samples(self.batch[0], *self.sample_ranges[micro])

    def targets(self, micro: int) -> Any:  # noqa: ANN401 - whatever the loss takes
        """Return the targets of a microbatch of this rank."""
        assert self.batch is not None, "only microbatches with samples are read"
        return slice_samples(self.batch[1], *self.sample_ranges[micro])

    def undivided(self, micro: int) -> tuple[Any, Any, int]:
        """Return inputs, targets and number of samples of this rank's batch."""
        assert self.batch is not None, "only microbatches with samples are read"
        count = max(stop for _, stop in self.sample_ranges.values())
        return *(slice_samples(values, 0, count) for values in self.batch), count


class PerRankBatchExchange:
    """Exchanges the sizes of the ranks' own batches, and checks that they can be trained on together.

    Args:
        fabric: this rank's fabric.
        optimizer_spec: the user's optimizer on this rank.
        uneven: whether ranks may bring different numbers of samples: True, or False for an error; None warns once.
    """

    def __init__(self, fabric: Fabric, optimizer_spec: OptimizerSpec, *, uneven: bool | None) -> None:
        self.fabric = fabric
        self.optimizer_spec = optimizer_spec
        self.uneven = uneven
        self.microbatches_by_rank: dict[int, tuple[int, ...]] = {}  # filled by set_program
        self.reported: set[str] = set()

    def exchange_info(
        self, step: int, count: int, *, content_digest: str = "", is_done: bool = False
    ) -> list[RankBatchInfo]:
        """Return what every rank brings to a step; a collective call.

        Raises:
            DataError: ranks would update with different optimizer options.
        """
        groups = [get_group_options(group) for group in self.optimizer_spec.optimizer.param_groups]
        everyone = tuple(range(self.fabric.num_ranks))
        numbers = self.all_gather_ints([count, is_done, int.from_bytes(digest(groups)[:7])], everyone)
        details: Sequence[Any] = [[[], ""]] * len(everyone)
        if (
            not self.microbatches_by_rank
            or any(is_finished for _, is_finished, _ in numbers)
            or len({options_digest for *_, options_digest in numbers}) > 1
        ):
            details = cast("list[Any]", self.fabric.gather_values("batches", [groups, content_digest], everyone))
        infos = [
            RankBatchInfo(size, bool(is_finished), *detail)
            for (size, is_finished, _), detail in zip(numbers, details, strict=True)
        ]
        present = [rank for rank in everyone if not infos[rank].is_done]
        if present:
            self.sync_optimizer_options(step, infos, present)
        return infos

    def all_gather_ints(self, local: Sequence[int], everyone: Group) -> list[list[int]]:
        """Return the integers that every rank passes, equally many on each."""
        numbers = torch.zeros(len(everyone) * len(local), dtype=torch.int64)
        bounds = range(0, len(numbers) + 1, len(local))
        rank = self.fabric.rank
        numbers[bounds[rank] : bounds[rank + 1]] = torch.tensor(local)
        self.fabric.all_gather("sizes of batches", numbers, bounds, everyone).wait()
        rows: list[list[int]] = numbers.view(len(everyone), -1).tolist()
        return rows

    def check_batches(self, step: int, infos: Sequence[RankBatchInfo]) -> None:
        """Warn once, or raise, if ranks have run out of samples, differ in their number, or bring the same ones.

        Raises:
            DataError: they differ, and ``uneven`` is False.
        """
        present = [rank for rank in self.microbatches_by_rank if not infos[rank].is_done]
        finished = [rank for rank in self.microbatches_by_rank if infos[rank].is_done]
        if finished and present:
            self.report_uneven(
                "ends",
                f"{format_ranks(finished)} had no more samples for step {step}, to which {format_ranks(present)} "
                "brought some",
                "the step uses the samples there are, equally weighted",
            )
        self.check_counts(step, infos, present)
        self.check_duplicates(infos, present)

    def sync_optimizer_options(self, step: int, infos: Sequence[RankBatchInfo], present: Sequence[int]) -> None:
        """Check that the ranks that train have equal optimizer options; a rank without samples adopts them.

        Raises:
            DataError: they are not equal.
        """
        first = present[0]
        for rank in present[1:]:
            pairs = zip(infos[first].optimizer_options, infos[rank].optimizer_options, strict=True)
            for index, (options, other_options) in enumerate(pairs):
                for key in [key for key in options if options[key] != other_options.get(key)]:
                    raise DataError(
                        f"in step {step} the optimizer's {key} of group {index} is {options[key]} on rank {first}, "
                        f"{other_options.get(key)} on rank {rank}, but ranks update one model; change it equally on "
                        f"all ranks: step a schedule until its last_epoch is step.number, which is {step} on all"
                    )
        if self.fabric.rank not in present:  # then the options were exchanged
            for group, options in zip(
                self.optimizer_spec.optimizer.param_groups, infos[first].optimizer_options, strict=True
            ):
                apply_group_options(group, options)

    def check_counts(self, step: int, infos: Sequence[RankBatchInfo], present: Sequence[int]) -> None:
        """Report ranks with batches of different sizes."""
        counts = {rank: infos[rank].count for rank in present}
        if len(set(counts.values())) > 1:
            sizes = ", ".join(
                f"{count} on {format_ranks([rank for rank in present if counts[rank] == count])}"
                for count in dict.fromkeys(counts.values())
            )
            self.report_uneven(
                "counts",
                f"the ranks' batches differ in size in step {step}: {sizes}",
                f"each of the {sum(counts.values())} samples has the same weight in the gradient, not each rank",
            )

    def check_duplicates(self, infos: Sequence[RankBatchInfo], present: Sequence[int]) -> None:
        """Warn if all ranks bring the same first batch, which a sampler should have sharded."""
        digests = {infos[rank].digest for rank in present}
        replicas = {self.microbatches_by_rank[rank] for rank in present}
        if len(digests) == 1 and digests != {""} and len(replicas) > 1 and self.fabric.rank == 0:
            warn(
                f"{format_ranks(present)} brought the same {infos[present[0]].count} samples to the first step, so "
                "each sample is computed more than once; shard them with a DistributedSampler, or pass "
                "batches='global' and leave the sharding to the step",
                stacklevel=5,
            )

    def report_uneven(self, kind: str, description: str, rule: str) -> None:
        """Warn once that ranks are uneven, or raise.

        Raises:
            DataError: ``uneven`` is False.
        """
        if self.uneven is False:
            raise DataError(
                f"{description}, which uneven=False forbids; give all ranks as many samples (drop_last=True, or a "
                "sampler that pads), or pass uneven=True"
            )
        if self.uneven is None and kind not in self.reported and self.fabric.rank == 0:
            warn(
                f"{description}; {rule}: pass uneven=True if that is intended, or uneven=False to make it an error",
                stacklevel=6,
            )
        self.reported.add(kind)

    def set_program(self, program: Program) -> None:
        """Set the microbatches of every rank.

        Raises:
            DataError: two ranks share some microbatches, but not all, so that neither can bring its own.
        """
        rank_programs = enumerate(program.rank_programs)
        self.microbatches_by_rank = {
            rank: microbatches
            for rank, rank_program in rank_programs
            if (
                microbatches := tuple(
                    sorted({instruction.micro for instruction in rank_program.body if isinstance(instruction, Forward)})
                )
            )
        }
        for first in set(self.microbatches_by_rank.values()):
            for second in set(self.microbatches_by_rank.values()) - {first}:
                if not set(first).isdisjoint(second):
                    raise DataError(
                        f"a rank of this plan runs microbatches {first}, another one {second}, so neither has a batch "
                        "of its own; pass batches='global', the whole batch on every rank"
                    )

    def make_batch(self, batch: tuple[Any, Any] | None, infos: Sequence[RankBatchInfo]) -> PerRankBatch:
        """Return the microbatches of this rank.

        Args:
            batch: its inputs and targets; None for no samples.
            infos: what all ranks have brought.

        Raises:
            DataError: ranks that compute parts of one replica have not brought the same samples.
        """
        sizes: dict[int, int] = {}
        sample_ranges: dict[int, tuple[int, int]] = {}
        for rank, microbatches in self.microbatches_by_rank.items():
            ranges = dict(zip(microbatches, split_batch(infos[rank].count, len(microbatches)), strict=True))
            self.require_same_replica_batch(self.replica_ranks(microbatches), infos)
            sizes |= {microbatch: stop - start for microbatch, (start, stop) in ranges.items()}
            if rank == self.fabric.rank:
                sample_ranges = ranges
        return PerRankBatch(batch, sample_ranges, sizes)

    def replica_ranks(self, microbatches: tuple[int, ...]) -> Group:
        """Return the ranks that compute these microbatches together."""
        return tuple(
            rank for rank, rank_microbatches in self.microbatches_by_rank.items() if rank_microbatches == microbatches
        )

    def require_same_replica_batch(self, members: Group, infos: Sequence[RankBatchInfo]) -> None:
        """Check that the ranks of one replica have brought the same samples.

        Raises:
            DataError: they have not.
        """
        contents = [(infos[rank].count, infos[rank].digest) for rank in members]
        if len(set(contents)) > 1:
            raise DataError(
                f"{format_ranks(members)} compute together on one batch, but brought "
                f"{', '.join(f'{count} samples' for count, _ in contents)}, not the same ones; shard the samples by "
                "replica: the ranks of one replica pass one batch"
            )


def require_synchronous_steps(plan: Plan, num_measured_plans: int = 0) -> None:
    """Check that a step finishes the batch that it starts, so that it uses what each rank brings to it.

    Args:
        plan: the plan.
        num_measured_plans: how many plans are measured before the first step.

    Raises:
        PlanError: several batches are in flight, or plans are measured, which takes one batch for all ranks.
    """
    if num_measured_plans:
        raise PlanError(
            f"num_measured_plans={num_measured_plans} trains plans on the first batch, which all ranks must have, but "
            "with batches='per_rank' each rank has samples of its own; pass batches='global', or omit "
            "num_measured_plans"
        )
    for strategy in plan.strategies:
        if isinstance(strategy, Pipeline) and strategy.is_async:
            raise PlanError(
                f"with batches='per_rank' each rank has samples of its own in a step, but under {strategy} all stages "
                "work on every batch, over several steps; pass batches='global', the whole batch on every rank, or use "
                "schedule=one_f_one_b"
            )
