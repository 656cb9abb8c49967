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
from counterpoint.program.program import Program, Row
from counterpoint.strategies.chunks import Chunks
from counterpoint.strategies.inside import cut_before, cuts_for, with_heads
from counterpoint.strategies.marks import Mark, counts_between, is_told, merged, read_marks, require_marks
from counterpoint.strategies.options import require_word
from counterpoint.strategies.orders.order import Order, Place, warmup
from counterpoint.strategies.orders.pipedream import STREAMS
from counterpoint.strategies.orders.table import find_order, require_order
from counterpoint.strategies.recomputation import WHEN, When
from counterpoint.strategies.stages import Stages, sliced_part, write_rows
from counterpoint.strategies.strategy import Forecast, Need, RankForecast, ring_share
from counterpoint.strategies.stream import Stream


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
    order: str = "one_f_one_b"
    replicas: tuple[int, ...] = ()
    balance: tuple[int, ...] = ()
    virtual: int = 1
    vertical_sync: Literal["off", "on"] = "off"
    cuts: tuple[str, ...] = ()
    recompute: When = "never"

    axis: ClassVar[str] = "stage"
    splits_batch: ClassVar[bool] = False
    need: ClassVar[Need] = "chain"

    def __post_init__(self) -> None:
        require_order(self.order, self.virtual)
        require_word("a pipeline", "recompute", self.recompute, WHEN)
        if self.vertical_sync not in {"off", "on"}:
            raise PlanError(f"a pipeline has no vertical_sync={self.vertical_sync!r}; give off or on")
        if self.vertical_sync == "on" and self.order != "pipedream":
            raise PlanError(
                f"vertical_sync=on is about microbatches that meet other versions on every stage, which order="
                f"{self.order} has none of; leave it out, or give order=pipedream"
            )
        counts = self.degree * self.virtual
        for name, given, wanted, of in (
            ("replicas", self.replicas, self.degree, "stage"),
            ("balance", self.balance, counts, "chunk" if self.virtual > 1 else "stage"),
        ):
            if given and (len(given) != wanted or min(given) < 1):
                raise PlanError(
                    f"{name}={given} of pipeline({self.degree}) must be {wanted} positive numbers, one per {of}"
                )
        if self.replicas and self.virtual > 1:
            raise PlanError(
                f"replicas={self.replicas} of pipeline({self.degree}) cannot have virtual={self.virtual} chunks each: "
                "the orders for several chunks take all stages to be alike; leave out one of the two, or write "
                f"pipeline({self.degree}, virtual={self.virtual}) * data(...)"
            )
        self._require_cuts()

    def _require_cuts(self) -> None:
        if self.cuts and self.balance:
            raise PlanError(
                f"balance={self.balance} and cuts={'+'.join(self.cuts)} of pipeline({self.degree}) both say where "
                f"{'chunks' if self.virtual > 1 else 'stages'} begin; leave out one of the two"
            )
        if is_told(self.marks) and (self.order != "gpipe" or self.virtual > 1 or self.replicas):
            raise PlanError(
                f"cuts={'+'.join(self.cuts)} of pipeline({self.degree}) tells the stage of each module, which needs "
                "order=gpipe, virtual=1 and no replicas, as the others take all stages to be alike; leave out the "
                "stages, or what is not of these"
            )
        counts = {"num_stages": self.degree, "num_chunks": self.degree * self.virtual}
        require_marks(self.marks, f"pipeline({self.degree})", **counts)

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The modules with which chunks begin."""
        return merged(read_marks(self.cuts, f"pipeline({self.degree})"))

    @property
    def cut_modules(self) -> tuple[str, ...]:
        """The paths of the modules before which the model has to be cut; what it begins with needs no cut."""
        return tuple(mark.module for mark in self.marks[is_told(self.marks) :])

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        parts = [str(self.degree)]
        if self.order != "one_f_one_b":
            parts.append(f"order={self.order}")
        if self.virtual > 1:
            parts.append(f"virtual={self.virtual}")
        if self.replicas:
            parts.append(f"replicas=({','.join(map(str, self.replicas))})")
        if self.balance:
            parts.append(f"balance=({','.join(map(str, self.balance))})")
        if self.cuts:
            parts.append(f"cuts={'+'.join(self.cuts)}")
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
    def is_stream(self) -> bool:
        """Whether it never flushes while batches come."""
        return self.order in STREAMS

    def microbatches(self, wanted: int) -> int:
        """Return the first number of microbatches from ``wanted`` on that divides over all replicas.

        Under pipedream, whose microbatches are batches of their own, it is the least, however many are wanted.
        """
        multiple = lcm(*self.stage_ranks)
        least = warmup(0, self.stage_ranks) * self.stage_ranks[0] if self.order == "pipedream_2bw" else 1
        wanted = 1 if self.order == "pipedream" else max(wanted, least)
        return -(-wanted // multiple) * multiple

    @property
    def num_chunks(self) -> int:
        """How many chunks a stage runs; one alone has nobody to wait for."""
        return self.virtual if self.degree > 1 else 1

    @property
    def how(self) -> Order:
        """The order, as it is for so many chunks; a stage that is alone needs none, and a stream has none."""
        return find_order(self.order, self.virtual) if self.degree > 1 else find_order("one_f_one_b", 1)

    def num_ranks(self, inner: int) -> int:
        """Return one copy of the given ranks for every replica of every stage."""
        return inner * sum(self.stage_ranks)

    def refine(self, model: ModelSpec) -> ModelSpec:
        """Return the model with blocks cut in two where a chunk is to begin inside.

        They stay whole where users say how many of them each chunk has, and in a stream of a model whose blocks share
        weights, which is cut by users or not at all.
        """
        if self.cuts:
            return cut_before(model, {mark.module for mark in self.marks})
        is_tied = any(len(unit) > 1 for unit in model.units)
        if self.balance or self.degree == 1 or (self.is_stream and is_tied):
            return model
        return with_heads(model, self._chunk_ranks, self._chunk_stages)

    @property
    def _chunk_ranks(self) -> tuple[int, ...]:
        """How many ranks share the work of each chunk."""
        return self.stage_ranks if self.num_chunks == 1 else (1,) * (self.degree * self.num_chunks)

    @property
    def _chunk_stages(self) -> tuple[int, ...]:
        """The stage that runs each chunk."""
        return self._dealt((1,) * (self.degree * self.num_chunks)).stages

    def _dealt(self, counts: Sequence[int]) -> Chunks:
        return Chunks.of(counts, num_stages=self.degree, is_folded=not self.is_stream and self.how.is_folded)

    def counts(self, model: ModelSpec) -> tuple[int, ...]:
        """Return how many blocks each chunk has.

        Raises:
            PlanError: more chunks than blocks, a balance that does not add up, or cuts that the model has no place for.
        """
        if self.cuts and self.virtual == self.num_chunks:
            return counts_between(self.marks, model, f"pipeline({self.degree})")
        num_chunks = self.degree * self.num_chunks
        if self.num_chunks > 1 and num_chunks > model.num_blocks:
            raise PlanError(
                f"{self} has {num_chunks} chunks, {self.num_chunks} for each of {self.degree} stages, but the model "
                f"has only {model.num_blocks} blocks; every chunk needs one: give fewer stages or chunks, or a model "
                "with more blocks"
            )
        if not self.balance and model.heads:
            begun = [sum(block.first_piece < head for block in model.blocks) for head in model.heads]
            return tuple(stop - start for start, stop in pairwise([*begun, model.num_blocks]))
        if not self.balance:
            return cuts_for(model.blocks, self._chunk_ranks, self._chunk_stages)
        if sum(self.balance) != model.num_blocks:
            raise PlanError(
                f"balance={self.balance} adds up to {sum(self.balance)} blocks, but the model has {model.num_blocks}; "
                "the stages together must run every block once"
            )
        return self.balance if self.virtual == self.num_chunks else (model.num_blocks,)

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program with one row per replica of each stage.

        Raises:
            PlanError: it does not come first, has more chunks than blocks, or microbatches that do not divide.
        """
        if self.is_stream:
            self._check_order(program)
            return self._stream(model).lower(program)
        seats = range(sum(self.stage_ranks))
        rows = self.seat_rows(program, model, seats)
        return Program(tuple(row for seat in seats for row in rows[seat]))

    def seat_rows(self, program: Program, model: ModelSpec, seats: Collection[int]) -> dict[int, tuple[Row, ...]]:
        """Return the rows of some seats, the replicas of all stages one after the other: those of their inner ranks.

        An inner rank whose row is empty has one there, too.

        Raises:
            PlanError: as :meth:`lower`.
        """
        self._check_order(program)
        chunks = self.chunks(model)
        return write_rows(Stages(chunks, chunks.strands(model), self.stage_ranks, self.how), program, seats)

    def chunks(self, model: ModelSpec) -> Chunks:
        """Return which blocks lie where."""
        told = [mark.stage for mark in self.marks if mark.stage is not None]
        if told:
            return Chunks.on_stages(self.counts(model), told)
        return self._dealt(self.counts(model))

    def _stream(self, model: ModelSpec) -> Stream:
        rule = "synced" if self.vertical_sync == "on" else STREAMS[self.order]
        chunks = self.chunks(model)
        return Stream(chunks.runs, chunks.strands(model), self.stage_ranks, rule, str(self))

    def _check_order(self, program: Program) -> None:
        for row in program.rows:
            self._check_row(row)

    def _check_row(self, row: Row) -> None:
        for word in row.body:
            if not isinstance(word, Forward | Backward | Commit | Update) and not (
                isinstance(word, Collective) and word.value.name in {"y", "dx"}
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

    def forecast(self, before: Forecast, model: ModelSpec) -> Forecast:
        """Return the forecast with each stage's activations and, for replicas and ties, sums of gradients."""
        if self.is_stream:
            return self._stream(model).forecast(before, model)
        chunks = self.chunks(model)
        ranks: list[RankForecast] = []
        for stage, count in enumerate(self.stage_ranks):
            alike = [self._forecast_rank(rank, chunks, stage, before.samples_per_micro, model) for rank in before.ranks]
            ranks += alike * count
        return replace(before, ranks=tuple(ranks))

    def _forecast_rank(
        self, rank: RankForecast, chunks: Chunks, stage: int, samples: int, model: ModelSpec
    ) -> RankForecast:
        blocks = chunks.blocks_of(stage)
        count = rank.num_micros // self.stage_ranks[stage]
        sent = chunks.strands(model).sent_bytes(stage)
        kept = {unit: size for unit, size in rank.updates.items() if set(unit) & set(blocks)}
        summed = sum(
            (2 * ring_share(_holders(unit, chunks, self.stage_ranks)) * size for unit, size in kept.items()),
            Fraction(0),
        )
        return RankForecast(
            blocks=blocks,
            num_micros=count,
            updates=kept,
            sent=sliced_part(rank, blocks, model) / self.stage_ranks[stage] + sent * count * samples,
            summed=rank.summed + summed,
            in_flight=self.how.in_flight(Place(stage, self.stage_ranks, tuple(range(count)), chunks.count(stage))),
            heads=tuple(run[0] for run in chunks.on(stage)),
        )


def _holders(unit: Unit, chunks: Chunks, replicas: Sequence[int]) -> int:
    """Return how many ranks of one pipeline hold a unit."""
    return sum(count for stage, count in enumerate(replicas) if set(unit) & set(chunks.blocks_of(stage)))
