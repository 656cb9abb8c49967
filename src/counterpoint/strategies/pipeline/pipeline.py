"""Pipelines: each stage runs chunks of blocks and hands its results to whoever runs the next one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import ClassVar, Literal

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.instruction import Backward, Collective, Commit, Forward, Update
from counterpoint.program.program import Program, RankProgram
from counterpoint.strategies.options import require_choice
from counterpoint.strategies.pipeline.async_pipeline import AsyncPipeline
from counterpoint.strategies.pipeline.chunks import Chunks
from counterpoint.strategies.pipeline.partition import choose_chunk_starts, default_partition, split_before
from counterpoint.strategies.pipeline.schedules.pipedream import ASYNC_SCHEDULES
from counterpoint.strategies.pipeline.schedules.registry import find_schedule, require_schedule
from counterpoint.strategies.pipeline.schedules.schedule import PipelineSchedule, StageReplica, warmup
from counterpoint.strategies.pipeline.split_points import (
    SplitPoint,
    check_split_points,
    count_blocks_per_chunk,
    has_explicit_stages,
    merge_adjacent,
    parse_split_points,
)
from counterpoint.strategies.pipeline.stage_programs import StageGrid, build_stage_programs, stage_tp_bytes
from counterpoint.strategies.recomputation import RECOMPUTE_MODES, RecomputeMode
from counterpoint.strategies.strategy import CostEstimate, Granularity, RankCost, ring_fraction


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Give each stage a row of its own, joined by sends and receives, and run microbatches through them.

    Args:
        degree: number of stages (with ``replicas``: still the number of stages).
        order: ``one_f_one_b``, ``gpipe``, ``interleaved`` or ``zero_bubble``; without a flush ``pipedream`` or
            ``pipedream_2bw``.
        replicas: ranks per stage; microbatch m goes to replica ``m mod r`` of each stage, its backward too.
        balance: blocks per chunk, in the order of the model; by default the slowest chunk is made as fast as can be
            within 5 %, and of such cuts one is taken that sends least; a chunk may then begin inside a block, where no
            more is sent than between blocks.
        cuts: in place of a balance the paths of the modules with which chunks begin, one for each but the first; or,
            under gpipe, ``module:stage`` for all chunks, which may lie on any stage, and several on one.
        virtual: chunks per stage, called virtual stages by others; chunk c of stage s stands at ``c n + s`` of n stages
            in the model, and at ``2 n - 1 - s`` where ``zero_bubble`` has its second one.
        vertical_sync: ``on`` has every stage compute a microbatch with weights that have seen the same microbatches
            as those of the first stage when it came there; only under ``pipedream``.
        recompute: ``always`` keeps of a chunk's forward only what enters it and computes it again, from before its
            gradient arrives; ``except_last`` keeps what goes backward as the next thing that the stage computes, which
            is the last microbatch under ``gpipe``; ``never`` keeps all.

    Promise:
        The orders with a flush change no numbers. pipedream and pipedream_2bw never flush while batches come, and a
        gradient is computed with older weights than those it is applied to. With w the warm-up of a stage,
        ``floor((R - 1 - replicas of earlier stages) / own replicas)`` of R in all: under pipedream a stage of r
        replicas updates after every r microbatches, with the mean over their samples, and forward and backward of a
        microbatch use the weights of w updates before; with vertical_sync the stages use those of one moment, w of the
        first stage ago. Under pipedream_2bw all stages update once per global batch,
        ``W(t+1) = W(t) - lr * gradient at W(t-1)``. After a flush (at the end of an epoch, before an evaluation, a
        checkpoint, and the end of a fit) the first microbatches meet the newest weights, as they do at the beginning.
        Running statistics have no versions. Each stage decides by itself whether an update counts.

    Cost:
        Bytes sent per rank and step, for each of its microbatches: what its chunks make for other stages, once to each
        stage that reads it, and the gradients of what they read of others; with r replicas ``2 (r-1)/r`` of its
        gradient bytes.
        Idle time, for n stages, m microbatches and v chunks: ``(n-1)/(v m+n-1)`` of the step, under zero_bubble with
        v = 1 and 2 as if v were 3 and 6. Memory: its stage's states; activations of m microbatches under gpipe, of
        ``n - stage`` under one_f_one_b, of ``n`` under zero_bubble, of up to ``n (1 + (n-1)/(n v))`` under interleaved.
        Without a flush: no idle time between two flushes; sums of gradients once per update; activations of w + 1
        microbatches, and weights of w + 1 versions under pipedream, of 2 under pipedream_2bw, of as many as the
        first stage has (in updates of its own) with vertical_sync.
        With recompute: one forward more for each microbatch that is recomputed; of the microbatches in flight what
        enters the chunk, and all activations of one.

    Source:
        Huang et al., GPipe, NeurIPS 2019; Narayanan et al., PipeDream, SOSP 2019, section 3; Narayanan et al.,
        Megatron-LM, SC 2021, section 2.2; Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024; Narayanan et al.,
        Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021 (2BW).
    """

    degree: int
    schedule: str = "one_f_one_b"
    replicas: tuple[int, ...] = ()
    balance: tuple[int, ...] = ()
    chunks_per_stage: int = 1
    vertical_sync: Literal["off", "on"] = "off"
    split_points: tuple[str, ...] = ()
    recompute: RecomputeMode = "never"

    axis: ClassVar[str] = "stage"
    splits_batch: ClassVar[bool] = False
    granularity: ClassVar[Granularity] = "blocks"

    def __post_init__(self) -> None:
        require_schedule(self.schedule, self.chunks_per_stage)
        require_choice("a pipeline", "recompute", self.recompute, RECOMPUTE_MODES)
        if self.vertical_sync not in {"off", "on"}:
            raise PlanError(f"a pipeline has no vertical_sync={self.vertical_sync!r}; give off or on")
        if self.vertical_sync == "on" and self.schedule != "pipedream":
            raise PlanError(
                f"vertical_sync=on is about microbatches that meet other versions on every stage, which schedule="
                f"{self.schedule} has none of; leave it out, or give schedule=pipedream"
            )
        counts = self.degree * self.chunks_per_stage
        for name, given, wanted, of in (
            ("replicas", self.replicas, self.degree, "stage"),
            ("balance", self.balance, counts, "chunk" if self.chunks_per_stage > 1 else "stage"),
        ):
            if given and (len(given) != wanted or min(given) < 1):
                raise PlanError(
                    f"{name}={given} of pipeline({self.degree}) must be {wanted} positive numbers, one per {of}"
                )
        if self.replicas and self.chunks_per_stage > 1:
            raise PlanError(
                f"replicas={self.replicas} of pipeline({self.degree}) cannot have chunks_per_stage={self.chunks_per_stage} chunks each: "
                "the schedules for several chunks take all stages to be alike; leave out one of the two, or write "
                f"pipeline({self.degree}, chunks_per_stage={self.chunks_per_stage}) * data(...)"
            )
        self._check_split_points()

    def _check_split_points(self) -> None:
        if self.split_points and self.balance:
            raise PlanError(
                f"balance={self.balance} and split_points={'+'.join(self.split_points)} of pipeline({self.degree}) both say where "
                f"{'chunks' if self.chunks_per_stage > 1 else 'stages'} begin; leave out one of the two"
            )
        if has_explicit_stages(self.parsed_split_points) and (
            self.schedule != "gpipe" or self.chunks_per_stage > 1 or self.replicas
        ):
            raise PlanError(
                f"split_points={'+'.join(self.split_points)} of pipeline({self.degree}) tells the stage of each module, which needs "
                "schedule=gpipe, chunks_per_stage=1 and no replicas, as the others take all stages to be alike; leave out the "
                "stages, or what is not of these"
            )
        counts = {"num_stages": self.degree, "num_chunks": self.degree * self.chunks_per_stage}
        check_split_points(self.parsed_split_points, f"pipeline({self.degree})", **counts)

    @property
    def parsed_split_points(self) -> tuple[SplitPoint, ...]:
        """The modules with which chunks begin."""
        return merge_adjacent(parse_split_points(self.split_points, f"pipeline({self.degree})"))

    @property
    def split_modules(self) -> tuple[str, ...]:
        """The paths of the modules before which the model has to be cut; what it begins with needs no cut."""
        return tuple(mark.module for mark in self.parsed_split_points[has_explicit_stages(self.parsed_split_points) :])

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        parts = [str(self.degree)]
        if self.schedule != "one_f_one_b":
            parts.append(f"schedule={self.schedule}")
        if self.chunks_per_stage > 1:
            parts.append(f"chunks_per_stage={self.chunks_per_stage}")
        if self.replicas:
            parts.append(f"replicas=({','.join(map(str, self.replicas))})")
        if self.balance:
            parts.append(f"balance=({','.join(map(str, self.balance))})")
        if self.split_points:
            parts.append(f"split_points={'+'.join(self.split_points)}")
        if self.vertical_sync == "on":
            parts.append("vertical_sync=on")
        if self.recompute != "never":
            parts.append(f"recompute={self.recompute}")
        return f"pipeline({', '.join(parts)})"

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """How many ranks run each stage."""
        return self.replicas or (1,) * self.degree

    @property
    def is_async(self) -> bool:
        """Whether it never flushes while batches come."""
        return self.schedule in ASYNC_SCHEDULES

    def usable_microbatches(self, wanted: int) -> int:
        """Return the first number of microbatches from ``wanted`` on that divides over all replicas.

        Under pipedream, whose microbatches are batches of their own, it is the least, however many are wanted.
        """
        multiple = lcm(*self.stage_ranks)
        least = warmup(0, self.stage_ranks) * self.stage_ranks[0] if self.schedule == "pipedream_2bw" else 1
        wanted = 1 if self.schedule == "pipedream" else max(wanted, least)
        return -(-wanted // multiple) * multiple

    @property
    def num_stage_chunks(self) -> int:
        """How many chunks a stage runs; one alone has nobody to wait for."""
        return self.chunks_per_stage if self.degree > 1 else 1

    @property
    def schedule_impl(self) -> PipelineSchedule:
        """The order, as it is for so many chunks; a stage that is alone needs none, and a stream has none."""
        return (
            find_schedule(self.schedule, self.chunks_per_stage) if self.degree > 1 else find_schedule("one_f_one_b", 1)
        )

    def num_ranks(self, inner: int) -> int:
        """Return one copy of the given ranks for every replica of every stage."""
        return inner * sum(self.stage_ranks)

    def split_model(self, model: ModelSpec) -> ModelSpec:
        """Return the model with blocks cut in two where a chunk is to begin inside.

        They stay whole where users say how many of them each chunk has, and in a stream of a model whose blocks share
        weights, which is cut by users or not at all.
        """
        if self.split_points:
            return split_before(model, {mark.module for mark in self.parsed_split_points})
        is_tied = any(len(unit) > 1 for unit in model.units)
        if self.balance or self.degree == 1 or (self.is_async and is_tied):
            return model
        return choose_chunk_starts(model, self._chunk_ranks, self._chunk_stages)

    @property
    def _chunk_ranks(self) -> tuple[int, ...]:
        """How many ranks share the work of each chunk."""
        return self.stage_ranks if self.num_stage_chunks == 1 else (1,) * (self.degree * self.num_stage_chunks)

    @property
    def _chunk_stages(self) -> tuple[int, ...]:
        """The stage that runs each chunk."""
        return self._assign_chunks((1,) * (self.degree * self.num_stage_chunks)).stages

    def _assign_chunks(self, counts: Sequence[int]) -> Chunks:
        return Chunks.of(
            counts, num_stages=self.degree, is_v_shaped=not self.is_async and self.schedule_impl.is_v_shaped
        )

    def blocks_per_chunk(self, model: ModelSpec) -> tuple[int, ...]:
        """Return how many blocks each chunk has.

        Raises:
            PlanError: more chunks than blocks, a balance that does not add up, or cuts that the model has no place for.
        """
        if self.split_points and self.chunks_per_stage == self.num_stage_chunks:
            return count_blocks_per_chunk(self.parsed_split_points, model, f"pipeline({self.degree})")
        num_chunks = self.degree * self.num_stage_chunks
        if self.num_stage_chunks > 1 and num_chunks > model.num_blocks:
            raise PlanError(
                f"{self} has {num_chunks} chunks, {self.num_stage_chunks} for each of {self.degree} stages, but the model "
                f"has only {model.num_blocks} blocks; every chunk needs one: give fewer stages or chunks, or a model "
                "with more blocks"
            )
        if not self.balance and model.chunk_starts:
            begun = [sum(block.first_layer < head for block in model.blocks) for head in model.chunk_starts]
            return tuple(stop - start for start, stop in pairwise([*begun, model.num_blocks]))
        if not self.balance:
            return default_partition(model.blocks, self._chunk_ranks, self._chunk_stages)
        if sum(self.balance) != model.num_blocks:
            raise PlanError(
                f"balance={self.balance} adds up to {sum(self.balance)} blocks, but the model has {model.num_blocks}; "
                "the stages together must run every block once"
            )
        return self.balance if self.chunks_per_stage == self.num_stage_chunks else (model.num_blocks,)

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program with one row per replica of each stage.

        Raises:
            PlanError: it does not come first, has more chunks than blocks, or microbatches that do not divide.
        """
        if self.is_async:
            self._check_is_innermost(program)
            return self._async_pipeline(model).lower(program)
        seats = range(sum(self.stage_ranks))
        rows = self.stage_programs(program, model, seats)
        return Program(tuple(row for seat in seats for row in rows[seat]))

    def stage_programs(
        self, program: Program, model: ModelSpec, slots: Collection[int]
    ) -> dict[int, tuple[RankProgram, ...]]:
        """Return the rows of some seats, the replicas of all stages one after the other: those of their inner ranks.

        An inner rank whose row is empty has one there, too.

        Raises:
            PlanError: as :meth:`lower`.
        """
        self._check_is_innermost(program)
        chunks = self.chunks(model)
        return build_stage_programs(
            StageGrid(chunks, chunks.edges(model), self.stage_ranks, self.schedule_impl), program, slots
        )

    def chunks(self, model: ModelSpec) -> Chunks:
        """Return which blocks lie where."""
        told = [mark.stage for mark in self.parsed_split_points if mark.stage is not None]
        if told:
            return Chunks.on_given_stages(self.blocks_per_chunk(model), told)
        return self._assign_chunks(self.blocks_per_chunk(model))

    def _async_pipeline(self, model: ModelSpec) -> AsyncPipeline:
        rule = "synced" if self.vertical_sync == "on" else ASYNC_SCHEDULES[self.schedule]
        chunks = self.chunks(model)
        return AsyncPipeline(chunks.block_ranges, chunks.edges(model), self.stage_ranks, rule, str(self))

    def _check_is_innermost(self, program: Program) -> None:
        for row in program.rank_programs:
            self._check_rank_program(row)

    def _check_rank_program(self, row: RankProgram) -> None:
        for word in row.body:
            if not isinstance(word, Forward | Backward | Commit | Update) and not (
                isinstance(word, Collective) and word.tensor.name in {"y", "dx"}
            ):
                raise PlanError(
                    f"{self} must come before data, zero and server in a plan, because it cuts one replica's work "
                    f"into stages; write {self} * data(...), not data(...) * {self}"
                )
        micros = {word.micro for word in row.body if isinstance(word, Forward)}
        for count in self.stage_ranks:
            if len(micros) % count:
                raise PlanError(
                    f"{len(micros)} microbatches do not divide over the {count} replicas of a stage of {self}; give a "
                    f"multiple of {count} microbatches"
                )

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the forecast with each stage's activations and, for replicas and ties, sums of gradients."""
        if self.is_async:
            return self._async_pipeline(model).estimate_cost(inner, model)
        chunks = self.chunks(model)
        ranks: list[RankCost] = []
        for stage, count in enumerate(self.stage_ranks):
            alike = [self._rank_cost(rank, chunks, stage, inner.samples_per_microbatch, model) for rank in inner.ranks]
            ranks += alike * count
        return replace(inner, ranks=tuple(ranks))

    def _rank_cost(self, rank: RankCost, chunks: Chunks, stage: int, samples: int, model: ModelSpec) -> RankCost:
        blocks = chunks.blocks_of(stage)
        count = rank.num_micros // self.stage_ranks[stage]
        sent = chunks.edges(model).sent_bytes(stage)
        kept = {unit: size for unit, size in rank.updates.items() if set(unit) & set(blocks)}
        summed = sum(
            (2 * ring_fraction(_count_holders(unit, chunks, self.stage_ranks)) * size for unit, size in kept.items()),
            Fraction(0),
        )
        return RankCost(
            blocks=blocks,
            num_micros=count,
            updates=kept,
            other_bytes=stage_tp_bytes(rank, blocks, model) / self.stage_ranks[stage] + sent * count * samples,
            allreduce_bytes=rank.allreduce_bytes + summed,
            in_flight=self.schedule_impl.in_flight(
                StageReplica(stage, self.stage_ranks, tuple(range(count)), chunks.count(stage))
            ),
            chunk_starts=tuple(run[0] for run in chunks.chunks_of(stage)),
        )


def _count_holders(unit: Unit, chunks: Chunks, replicas: Sequence[int]) -> int:
    """Return how many ranks of one pipeline hold a unit."""
    return sum(count for stage, count in enumerate(replicas) if set(unit) & set(chunks.blocks_of(stage)))
