"""Pipelines: each stage runs a run of blocks and hands its results to the next one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from math import lcm
from typing import ClassVar, Literal

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Forward,
    Instruction,
    Recv,
    Send,
    Update,
    Value,
    grad,
)
from counterpoint.program.program import Program, Row, Words
from counterpoint.program.rewrite import shifted
from counterpoint.strategies.balance import even_cuts
from counterpoint.strategies.orders.order import Place, Turn, warmup
from counterpoint.strategies.orders.pipedream import STREAMS
from counterpoint.strategies.orders.table import ORDERS
from counterpoint.strategies.stages import Work, sliced_part, work_of
from counterpoint.strategies.strategy import Forecast, Need, RankForecast, ring_share
from counterpoint.strategies.stream import Stream


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Give each stage a row of its own, joined by sends and receives, and run microbatches through them.

    Args:
        degree: number of stages (with ``replicas``: still the number of stages).
        order: ``one_f_one_b`` or ``gpipe``; without a flush ``pipedream`` or ``pipedream_2bw``.
        replicas: ranks per stage; microbatch m goes to replica ``m mod r`` of each stage, its backward too.
        balance: blocks per stage; by default the slowest stage is made as fast as can be.
        vertical_sync: ``on`` has every stage compute a microbatch with weights that have seen the same microbatches
            as those of the first stage when it came there; only under ``pipedream``.

    Promise:
        gpipe and one_f_one_b change no numbers. The others never flush while batches come, and a gradient is computed
        with older weights than those it is applied to. With w the warm-up of a stage, ``floor((R - 1 - replicas of
        earlier stages) / own replicas)`` of R in all: under pipedream a stage of r replicas updates after every r
        microbatches, with the mean over their samples, and forward and backward of a microbatch use the weights of w
        updates before; with vertical_sync the stages use those of one moment, w of the first stage ago. Under
        pipedream_2bw all stages update once per global batch, ``W(t+1) = W(t) - lr * gradient at W(t-1)``. After a
        flush (at the end of an epoch, before an evaluation, a checkpoint, and the end of a fit) the first
        microbatches meet the newest weights, as they do at the beginning. Running statistics have no versions. Each
        stage decides by itself whether an update counts.

    Cost:
        Bytes sent per rank and step: the activations that leave its stage and the gradients that leave it
        backwards, for each of its microbatches; with r replicas ``2 (r-1)/r`` of its gradient bytes.
        Idle time: ``(n-1)/(m+n-1)`` of the step. Memory: its stage's states; activations of m microbatches
        under gpipe, of ``n - stage`` under one_f_one_b.
        Without a flush: no idle time between two flushes; sums of gradients once per update; activations of w + 1
        microbatches, and weights of w + 1 versions under pipedream, of 2 under pipedream_2bw, of as many as the
        first stage has (in updates of its own) with vertical_sync.

    Source:
        Huang et al., GPipe, NeurIPS 2019; Narayanan et al., PipeDream, SOSP 2019, section 3; Narayanan et al.,
        Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021 (2BW).
    """

    degree: int
    order: str = "one_f_one_b"
    replicas: tuple[int, ...] = ()
    balance: tuple[int, ...] = ()
    vertical_sync: Literal["off", "on"] = "off"

    axis: ClassVar[str] = "stage"
    splits_batch: ClassVar[bool] = False
    need: ClassVar[Need] = "chain"

    def __post_init__(self) -> None:
        if self.order not in ORDERS and not self.is_stream:
            orders = ", ".join(sorted([*ORDERS, *STREAMS]))
            raise PlanError(f"there is no pipeline order {self.order!r}; the orders are {orders}")
        if self.vertical_sync not in {"off", "on"}:
            raise PlanError(f"a pipeline has no vertical_sync={self.vertical_sync!r}; give off or on")
        if self.vertical_sync == "on" and self.order != "pipedream":
            raise PlanError(
                f"vertical_sync=on is about microbatches that meet other versions on every stage, which order="
                f"{self.order} has none of; leave it out, or give order=pipedream"
            )
        for name, counts in (("replicas", self.replicas), ("balance", self.balance)):
            if counts and (len(counts) != self.degree or min(counts) < 1):
                raise PlanError(
                    f"{name}={counts} of pipeline({self.degree}) must be {self.degree} positive numbers, one per stage"
                )

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        parts = [str(self.degree)]
        if self.order != "one_f_one_b":
            parts.append(f"order={self.order}")
        if self.replicas:
            parts.append(f"replicas=({','.join(map(str, self.replicas))})")
        if self.balance:
            parts.append(f"balance=({','.join(map(str, self.balance))})")
        if self.vertical_sync == "on":
            parts.append("vertical_sync=on")
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

    def num_ranks(self, inner: int) -> int:
        """Return one copy of the given ranks for every replica of every stage."""
        return inner * sum(self.stage_ranks)

    def refine(self, model: ModelSpec) -> ModelSpec:
        """Return the model as it is."""
        return model

    def cuts(self, model: ModelSpec) -> tuple[int, ...]:
        """Return how many blocks each stage runs.

        Raises:
            PlanError: more stages than blocks, or a balance that does not add up.
        """
        if not self.balance:
            return even_cuts([block.cost for block in model.blocks], self.stage_ranks)
        if sum(self.balance) != model.num_blocks:
            raise PlanError(
                f"balance={self.balance} adds up to {sum(self.balance)} blocks, but the model has {model.num_blocks}; "
                "the stages together must run every block once"
            )
        return self.balance

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program with one row per replica of each stage.

        Raises:
            PlanError: it does not come first, has more stages than blocks, or microbatches that do not divide.
        """
        stages = self._stages(model)
        for row in program.rows:
            self._check_order(row)
        if self.is_stream:
            return self._stream(stages).lower(program)
        rows = []
        for stage, count in enumerate(self.stage_ranks):
            for twin in range(count):
                for rank, row in enumerate(program.rows):
                    drawn = _StageRow(self, stages, stage, twin, (rank, program.num_ranks))
                    rows.append(replace(row, body=tuple(drawn.words(row))))
        return Program(tuple(rows))

    def _stream(self, stages: tuple[range, ...]) -> Stream:
        rule = "synced" if self.vertical_sync == "on" else STREAMS[self.order]
        return Stream(stages, self.stage_ranks, rule, str(self))

    def _stages(self, model: ModelSpec) -> tuple[range, ...]:
        stops = list(accumulate(self.cuts(model)))
        return tuple(range(start, stop) for start, stop in zip([0, *stops], stops, strict=False))

    def _check_order(self, row: Row) -> None:
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
        stages = self._stages(model)
        if self.is_stream:
            return self._stream(stages).forecast(before, model)
        ranks: list[RankForecast] = []
        for stage, count in enumerate(self.stage_ranks):
            for twin in range(count):
                ranks += [self._forecast_rank(rank, (stages, stage, twin), before, model) for rank in before.ranks]
        return replace(before, ranks=tuple(ranks))

    def _forecast_rank(
        self,
        rank: RankForecast,
        place: tuple[tuple[range, ...], int, int],
        before: Forecast,
        model: ModelSpec,
    ) -> RankForecast:
        stages, stage, _twin = place
        blocks = stages[stage]
        count = rank.num_micros // self.stage_ranks[stage]
        sent = 0
        if stage < self.degree - 1:
            sent += model.blocks[blocks[-1]].output_bytes
        if stage > 0:
            sent += model.blocks[blocks[0] - 1].output_bytes
        kept = {unit: size for unit, size in rank.updates.items() if set(unit) & set(blocks)}
        summed = sum(
            (2 * ring_share(_holders(unit, stages, self.stage_ranks)) * size for unit, size in kept.items()),
            Fraction(0),
        )
        here = Place(stage, self.stage_ranks, tuple(range(count)))
        return RankForecast(
            blocks=tuple(blocks),
            num_micros=count,
            updates=kept,
            sent=sliced_part(rank, blocks, model) / self.stage_ranks[stage] + sent * count * before.samples_per_micro,
            summed=rank.summed + summed,
            in_flight=count if self.order == "gpipe" else min(here.warmup + 1, count),
        )


def _holders(unit: Unit, stages: Sequence[range], replicas: Sequence[int]) -> int:
    """Return how many ranks of one pipeline hold a unit."""
    return sum(count for blocks, count in zip(stages, replicas, strict=True) if set(unit) & set(blocks))


@dataclass(frozen=True, slots=True)
class _StageRow:
    """One replica of one stage, about to be written out for one inner rank.

    Args:
        plan: the pipeline.
        stages: the blocks of each stage.
        stage: which stage.
        twin: which replica of it.
        inner: the inner rank, and how many there are.
    """

    plan: Pipeline
    stages: tuple[range, ...]
    stage: int
    twin: int
    inner: tuple[int, int]

    def rank_of(self, stage: int, twin: int) -> int:
        """Return the rank that runs a replica of a stage for the same inner rank."""
        at = sum(self.plan.stage_ranks[:stage]) + twin
        return at * self.inner[1] + self.inner[0]

    def words(self, row: Row) -> Iterator[Instruction]:
        """Yield what this replica does instead of the inner rank's whole row."""
        work = work_of(row.body)
        micros = sorted({micro for _, _, micro in work})
        own = tuple(micros[self.twin :: self.plan.stage_ranks[self.stage]])
        index_of = {micro: index for index, micro in enumerate(micros)}
        for turn in ORDERS[self.plan.order](Place(self.stage, self.plan.stage_ranks, own)):
            yield from self._turn(turn, index_of[turn[1]], work)
        yield from self._finish(row.body)

    def _turn(self, turn: Turn, index: int, work: Work) -> Iterator[Instruction]:
        direction, micro = turn
        blocks = self.stages[self.stage]
        into, out = Value("x", (blocks[0],), micro), Value("x", (blocks[-1] + 1,), micro)
        back, on = Value("g", (blocks[-1],), micro), Value("g", (blocks[0] - 1,), micro)
        if direction == "F":
            yield from self._message(Recv, into, self.stage - 1, index)
            for block in blocks:
                yield from self._moved(work[Forward, block, micro])
            yield from self._message(Send, out, self.stage + 1, index)
        else:
            yield from self._message(Recv, back, self.stage + 1, index)
            for block in reversed(blocks):
                yield from self._moved(work[Backward, block, micro])
            yield from self._message(Send, on, self.stage - 1, index)

    def _message(self, make: type[Send | Recv], value: Value, stage: int, index: int) -> Iterator[Instruction]:
        if 0 <= stage < len(self.stages):
            yield make(value, self.rank_of(stage, index % self.plan.stage_ranks[stage]))

    def _moved(self, words: Words) -> Iterator[Instruction]:
        by = self.rank_of(self.stage, self.twin) - self.inner[0]
        return (shifted(word, by) for word in words)

    def _finish(self, body: Words) -> Iterator[Instruction]:
        blocks = set(self.stages[self.stage])
        units = [word.unit for word in body if isinstance(word, Update) and set(word.unit) & blocks]
        for unit in sorted(units, reverse=True):
            holders = tuple(
                self.rank_of(stage, twin)
                for stage, run in enumerate(self.stages)
                if set(unit) & set(run)
                for twin in range(self.plan.stage_ranks[stage])
            )
            if len(holders) > 1:
                yield Collective("sum", grad(unit), holders)
        everyone = tuple(range(self.inner[1] * sum(self.plan.stage_ranks)))
        yield Commit(everyone)
        yield from (Update(unit) for unit in units)
