"""Pipeline parallelism: each stage runs chunks of consecutive blocks and sends its results to the next stages.

::

    Pipeline.lower          from the program of one replica to one of all stages
      chunks                which blocks are a chunk (split_points.py, partition.py), on which stage (chunks.py)
      schedule_impl         in which order a stage runs its forwards and backwards: schedules/
      stage_programs        that order with sends, receives and the reductions of replicas: stage_programs.py
      _async_pipeline       instead of both, if batches follow each other without a flush: async_pipeline.py
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import ClassVar, Literal

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.optim.validation import renamed_parameters
from counterpoint.program.instruction import Backward, Collective, Commit, Forward, Update
from counterpoint.program.program import Program, RankProgram
from counterpoint.strategies.options import changed_options, format_term, require_choice
from counterpoint.strategies.pipeline.async_pipeline import AsyncPipeline
from counterpoint.strategies.pipeline.chunks import Chunks
from counterpoint.strategies.pipeline.partition import choose_chunk_starts, default_partition, split_before
from counterpoint.strategies.pipeline.schedules.own_schedule import OwnSchedule, build_own_schedule, schedule_name
from counterpoint.strategies.pipeline.schedules.registry import (
    ASYNC_SCHEDULES,
    find_schedule,
    require_chunk_count,
    require_schedule,
)
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
from counterpoint.strategies.renamed import RENAMED
from counterpoint.strategies.strategy import CostEstimate, Granularity, RankCost, Strategy, ring_fraction


@renamed_parameters({old: RENAMED[old] for old in ("order", "virtual", "cuts")})
@dataclass(frozen=True, slots=True)
class Pipeline(Strategy):
    """Split the model into stages on different ranks and run microbatches through them.

    Args:
        degree: number of stages.
        schedule: ``one_f_one_b``, ``gpipe``, ``interleaved`` or ``zero_bubble``; without a flush ``pipedream`` or
            ``pipedream_2bw``; or a function of one's own, from a ``StageReplica`` to its actions in order.
        replicas: number of ranks of each stage; microbatch m is run, forward and backward, by replica ``m mod r``.
        balance: number of blocks of each chunk, in the order of the model. By default the slowest chunk is within 5 %
            of the fastest possible, and of such partitions one that sends least is taken; a chunk may then begin inside
            a block, where no more is sent than between blocks.
        split_points: instead of a balance the paths of the modules with which chunks begin, one for each chunk but the
            first; or, with gpipe, ``module:stage`` for all chunks, on any stages, and several on one.
        chunks_per_stage: number of chunks (virtual stages) of each stage; chunk c of stage s is number ``c n + s`` of
            the model with n stages, and ``2 n - 1 - s`` is the second one of ``zero_bubble``.
        vertical_sync: with ``on`` every stage computes a microbatch with weights that have seen the same microbatches
            as those of the first stage when it started there; only with ``pipedream``.
        recompute: ``always`` saves only the input of a chunk's forward and recomputes it before its gradient arrives;
            ``except_last`` saves the activations of a forward if its backward is the stage's next computation, as that
            of the last microbatch with ``gpipe``; ``never`` saves all.

    Promise:
        Schedules with a flush give the same results as single-process training. pipedream and pipedream_2bw do not
        flush between batches, and a gradient is computed with older weights than those it is applied to. Let w be the
        warm-up of a stage, ``floor((R - 1 - replicas of earlier stages) / own replicas)`` of R in total. With pipedream
        a stage of r replicas updates after every r microbatches, with the mean over their samples; forward and backward
        of a microbatch use the weights of w updates before. With vertical_sync all stages use the weights of one
        moment, w updates of the first stage ago. With pipedream_2bw all stages update once per global batch,
        ``W(t+1) = W(t) - lr * gradient at W(t-1)``. After a flush (at the end of an epoch or a fit, before an
        evaluation or a checkpoint) the first microbatches use the newest weights, as at the beginning. Running
        statistics have no versions. Each stage decides independently whether an update is applied.

    Cost:
        Bytes sent per rank and step, for each of its microbatches: the activations of its chunks once to each stage
        that consumes them, and the gradients of the activations that it consumes; with r replicas ``2 (r-1)/r`` of its
        gradient bytes.
        Bubble, for n stages, m microbatches and v chunks: ``(n-1)/(v m+n-1)`` of the step; under zero_bubble v = 1 and
        2 count as 3 and 6. Memory: the states of its stage; activations of m microbatches under gpipe, of ``n - stage``
        under one_f_one_b, of ``n`` under zero_bubble, of up to ``n (1 + (n-1)/(n v))`` under interleaved.
        Without a flush: no bubble between two flushes; one all-reduce of gradients per update; activations of w + 1
        microbatches; w + 1 versions of the weights under pipedream, 2 under pipedream_2bw, and with vertical_sync as
        many as the first stage has (in its own updates).
        With recompute: one more forward for each microbatch that is recomputed; the chunk inputs of the microbatches in
        flight, and all activations of one.

    Source:
        Huang et al., GPipe, NeurIPS 2019; Narayanan et al., PipeDream, SOSP 2019, section 3; Narayanan et al.,
        Megatron-LM, SC 2021, section 2.2; Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024; Narayanan et al.,
        Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021 (2BW).
    """

    degree: int
    schedule: str | PipelineSchedule | OwnSchedule = "one_f_one_b"
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
        if isinstance(self.schedule, str):
            require_schedule(self.schedule, self.chunks_per_stage)
        else:
            require_chunk_count(build_own_schedule(self.schedule), self.chunks_per_stage)
        require_choice("a pipeline", "recompute", self.recompute, RECOMPUTE_MODES)
        if self.vertical_sync not in {"off", "on"}:
            raise PlanError(f"a pipeline has no vertical_sync={self.vertical_sync!r}; give off or on")
        if self.vertical_sync == "on" and self.schedule != "pipedream":
            raise PlanError(
                f"vertical_sync=on needs several versions of the weights, and schedule={self.schedule_name} has one "
                "policy for them; drop it, or give schedule=pipedream"
            )
        num_chunks = self.degree * self.chunks_per_stage
        for name, given, wanted, owner in (
            ("replicas", self.replicas, self.degree, "stage"),
            ("balance", self.balance, num_chunks, "chunk" if self.chunks_per_stage > 1 else "stage"),
        ):
            if given and (len(given) != wanted or min(given) < 1):
                raise PlanError(
                    f"{name}={given} of pipeline({self.degree}) must be {wanted} positive numbers, one per {owner}"
                )
        if self.replicas and self.chunks_per_stage > 1:
            raise PlanError(
                f"replicas={self.replicas} of pipeline({self.degree}) needs chunks_per_stage=1, not "
                f"{self.chunks_per_stage}: schedules for several chunks have the same number of ranks on all stages; "
                f"drop one of the two, or write pipeline({self.degree}, chunks_per_stage={self.chunks_per_stage}) * "
                "data(...)"
            )
        self._check_split_points()

    def _check_split_points(self) -> None:
        given = f"split_points={'+'.join(self.split_points)}"
        if self.split_points and self.balance:
            raise PlanError(
                f"balance={self.balance} and {given} of pipeline({self.degree}) both say where "
                f"{'chunks' if self.chunks_per_stage > 1 else 'stages'} begin; drop one of the two"
            )
        points = self.parsed_split_points
        if has_explicit_stages(points) and (self.schedule != "gpipe" or self.chunks_per_stage > 1 or self.replicas):
            raise PlanError(
                f"{given} of pipeline({self.degree}) gives the stage of each module, which needs schedule=gpipe, "
                "chunks_per_stage=1 and no replicas; drop the stages, or the other options"
            )
        counts = {"num_stages": self.degree, "num_chunks": self.degree * self.chunks_per_stage}
        check_split_points(points, f"pipeline({self.degree})", **counts)

    @property
    def parsed_split_points(self) -> tuple[SplitPoint, ...]:
        """The modules with which chunks begin, with their stages if given."""
        return merge_adjacent(parse_split_points(self.split_points, f"pipeline({self.degree})"))

    @property
    def split_modules(self) -> tuple[str, ...]:
        """Paths of the modules before which the model has to be split: all but the one that it begins with."""
        points = self.parsed_split_points
        return tuple(point.module for point in points[has_explicit_stages(points) :])

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        names = "chunks_per_stage", "replicas", "balance", "split_points", "vertical_sync", "recompute"
        schedule = [f"schedule={self.schedule_name}"] if self.schedule != "one_f_one_b" else []
        return format_term("pipeline", self.degree, [*schedule, *changed_options(self, *names)])

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Number of ranks of each stage."""
        return self.replicas or (1,) * self.degree

    @property
    def is_async(self) -> bool:
        """Whether it does not flush between batches."""
        return self.schedule in ASYNC_SCHEDULES

    @property
    def schedule_name(self) -> str:
        """The name of the schedule."""
        return schedule_name(self.schedule)

    def usable_microbatches(self, wanted: int) -> int:
        """Return the smallest number of microbatches from ``wanted`` on that is divisible by all numbers of replicas.

        Under pipedream, where each microbatch is a batch of its own, it is always the smallest possible number.
        """
        multiple = lcm(*self.stage_ranks)
        least = warmup(0, self.stage_ranks) * self.stage_ranks[0] if self.schedule == "pipedream_2bw" else 1
        wanted = 1 if self.schedule == "pipedream" else max(wanted, least)
        return -(-wanted // multiple) * multiple

    @property
    def num_stage_chunks(self) -> int:
        """Number of chunks of a stage; 1 for a single stage, which has no bubble to reduce."""
        return self.chunks_per_stage if self.degree > 1 else 1

    @property
    def schedule_impl(self) -> PipelineSchedule:
        """The schedule with a flush for the number of chunks; for a single stage any will do."""
        if self.degree == 1:
            return find_schedule("one_f_one_b", 1)
        if isinstance(self.schedule, str):
            return find_schedule(self.schedule, self.chunks_per_stage)
        return build_own_schedule(self.schedule)

    def num_ranks(self, inner: int) -> int:
        """Return the inner ranks times the number of stage replicas."""
        return inner * sum(self.stage_ranks)

    def split_model(self, model: ModelSpec) -> ModelSpec:
        """Return the model with blocks split in two where a chunk begins inside.

        Blocks stay whole if the user gives a balance. In an asynchronous pipeline of a model with shared weights only
        the user decides where stages begin, because stages must not share weights.
        """
        if self.split_points:
            return split_before(model, {point.module for point in self.parsed_split_points})
        is_tied = any(len(unit) > 1 for unit in model.units)
        if self.balance or self.degree == 1 or (self.is_async and is_tied):
            return model
        return choose_chunk_starts(model, self._chunk_ranks, self._chunk_stages)

    @property
    def _chunk_ranks(self) -> tuple[int, ...]:
        """Number of ranks that share the work of each chunk."""
        return self.stage_ranks if self.num_stage_chunks == 1 else (1,) * (self.degree * self.num_stage_chunks)

    @property
    def _chunk_stages(self) -> tuple[int, ...]:
        """Stage of each chunk."""
        return self._assign_chunks((1,) * (self.degree * self.num_stage_chunks)).stages

    def _assign_chunks(self, counts: Sequence[int]) -> Chunks:
        is_v_shaped = not self.is_async and self.schedule_impl.is_v_shaped
        return Chunks.of(counts, num_stages=self.degree, is_v_shaped=is_v_shaped)

    def blocks_per_chunk(self, model: ModelSpec) -> tuple[int, ...]:
        """Return the number of blocks of each chunk.

        Raises:
            PlanError: there are more chunks than blocks, a balance does not add up, or a split point is not in the
                model.
        """
        if self.split_points and self.chunks_per_stage == self.num_stage_chunks:
            return count_blocks_per_chunk(self.parsed_split_points, model, f"pipeline({self.degree})")
        num_chunks = self.degree * self.num_stage_chunks
        if self.num_stage_chunks > 1 and num_chunks > model.num_blocks:
            raise PlanError(
                f"{self} has {num_chunks} chunks, {self.num_stage_chunks} for each of {self.degree} stages, but the "
                f"model has only {model.num_blocks} blocks; every chunk needs one: give fewer stages or chunks, or a "
                "model with more blocks"
            )
        if not self.balance and model.chunk_starts:
            starts = [sum(block.first_layer < start for block in model.blocks) for start in model.chunk_starts]
            return tuple(stop - start for start, stop in pairwise([*starts, model.num_blocks]))
        if not self.balance:
            return default_partition(model.blocks, self._chunk_ranks, self._chunk_stages)
        if sum(self.balance) != model.num_blocks:
            raise PlanError(
                f"balance={self.balance} adds up to {sum(self.balance)} blocks, but the model has {model.num_blocks}; "
                "the stages together must run every block once"
            )
        return self.balance if self.chunks_per_stage == self.num_stage_chunks else (model.num_blocks,)

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program with one rank for each stage replica and inner rank.

        Raises:
            PlanError: it is not the innermost strategy, has more chunks than blocks, or a number of microbatches that
                is not divisible by the number of replicas.
        """
        if self.is_async:
            self._check_is_innermost(program)
            return self._async_pipeline(model).lower(program)
        slots = range(sum(self.stage_ranks))
        stage_programs = self.stage_programs(program, model, slots)
        return Program(tuple(rank_program for slot in slots for rank_program in stage_programs[slot]))

    def stage_programs(
        self, program: Program, model: ModelSpec, slots: Collection[int]
    ) -> dict[int, tuple[RankProgram, ...]]:
        """Return the rank programs of some stage replicas, one for each inner rank.

        Args:
            program: of the inner ranks; a rank without instructions stays without.
            model: with the blocks of the pipeline.
            slots: indices over the replicas of all stages.

        Raises:
            PlanError: as :meth:`lower`.
        """
        self._check_is_innermost(program)
        chunks = self.chunks(model)
        grid = StageGrid(chunks, chunks.edges(model), self.stage_ranks, self.schedule_impl)
        return build_stage_programs(grid, program, slots)

    def chunks(self, model: ModelSpec) -> Chunks:
        """Return the blocks and the stage of each chunk."""
        stages = [point.stage for point in self.parsed_split_points if point.stage is not None]
        if stages:
            return Chunks.on_given_stages(self.blocks_per_chunk(model), stages)
        return self._assign_chunks(self.blocks_per_chunk(model))

    def _async_pipeline(self, model: ModelSpec) -> AsyncPipeline:
        policy = "vertical_sync" if self.vertical_sync == "on" else ASYNC_SCHEDULES[self.schedule_name]
        chunks = self.chunks(model)
        return AsyncPipeline(chunks.block_ranges, chunks.edges(model), self.stage_ranks, policy, str(self))

    def _check_is_innermost(self, program: Program) -> None:
        for rank_program in program.rank_programs:
            self._check_rank_program(rank_program)

    def _check_rank_program(self, rank_program: RankProgram) -> None:
        for instruction in rank_program.body:
            if not isinstance(instruction, Forward | Backward | Commit | Update) and not (
                isinstance(instruction, Collective) and instruction.tensor.name in {"y", "dx"}
            ):
                raise PlanError(
                    f"{self} must come before data, zero and server in a plan, because it splits the work of one "
                    f"replica into stages; write {self} * data(...), not data(...) * {self}"
                )
        micros = {instruction.micro for instruction in rank_program.body if isinstance(instruction, Forward)}
        for count in self.stage_ranks:
            if len(micros) % count:
                raise PlanError(
                    f"{len(micros)} microbatches are not divisible by the {count} replicas of a stage of {self}; give "
                    f"a multiple of {count} microbatches"
                )

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the cost with the activations of each stage and, for replicas and shared weights, all-reduces."""
        if self.is_async:
            return self._async_pipeline(model).estimate_cost(inner, model)
        chunks = self.chunks(model)
        ranks: list[RankCost] = []
        for stage, count in enumerate(self.stage_ranks):
            samples = inner.samples_per_microbatch
            ranks += [self._rank_cost(rank, chunks, stage, samples, model) for rank in inner.ranks] * count
        return replace(inner, ranks=tuple(ranks))

    def _rank_cost(self, rank: RankCost, chunks: Chunks, stage: int, samples: int, model: ModelSpec) -> RankCost:
        blocks = chunks.blocks_of(stage)
        num_replicas = self.stage_ranks[stage]
        count = rank.num_micros // num_replicas
        activation_bytes = chunks.edges(model).sent_bytes(stage) * count * samples
        updates = {unit: size for unit, size in rank.updates.items() if set(unit) & set(blocks)}
        allreduce_bytes = sum(
            (
                2 * ring_fraction(_count_holders(unit, chunks, self.stage_ranks)) * size * model.reduced_fraction(unit)
                for unit, size in updates.items()
            ),
            Fraction(0),
        )
        replica = StageReplica(stage, self.stage_ranks, tuple(range(count)), chunks.count(stage))
        return RankCost(
            blocks=blocks,
            num_micros=count,
            updates=updates,
            other_bytes=stage_tp_bytes(rank, blocks, model) / num_replicas + activation_bytes,
            allreduce_bytes=rank.allreduce_bytes + allreduce_bytes,
            in_flight=self.schedule_impl.in_flight(replica),
            chunk_starts=tuple(run[0] for run in chunks.chunks_of(stage)),
        )


def _count_holders(unit: Unit, chunks: Chunks, replicas: Sequence[int]) -> int:
    """Return how many ranks of one pipeline hold a unit."""
    return sum(count for stage, count in enumerate(replicas) if set(unit) & set(chunks.blocks_of(stage)))
