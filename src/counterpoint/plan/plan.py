"""A plan: which strategies, in which order, over how many microbatches; as values, as text and as YAML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from pathlib import Path

import yaml

from counterpoint.errors import PlanError
from counterpoint.model.model_profile import ModelProfile, load_profile
from counterpoint.plan.parser import build_strategies, parse_term, resolve_microbatches
from counterpoint.plan.registry import HAS_STEP_VARIANTS, NEEDS_SERVERS
from counterpoint.plan.source import PlanSource, parse_plan_file, plan_error_at
from counterpoint.strategies.buckets import DEFAULT_BUCKETS, BucketConfig
from counterpoint.strategies.data import Data
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.recomputation import RECOMPUTE_PASS, Recomputation
from counterpoint.strategies.strategy import Granularity, Strategy
from counterpoint.strategies.sync_schedule import StepKind, SyncSchedule
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.zero import Zero
from counterpoint.world.mesh import Axis, Mesh

KNOWN_PASSES = ("overlap", RECOMPUTE_PASS)
DEFAULT_PASSES = ("overlap",)
"""What is done to a program where nobody says what."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A complete answer to the question "who does what"; pure data.

    Args:
        strategies: applied from left to right, each spreading the program over one more axis.
        num_microbatches: microbatches of the innermost program; replicas multiply them.
        passes: what is done to the program afterwards, from ``overlap`` and ``recompute``; the latter recomputes all
            blocks, ``recompute:*.attn`` those of these module paths, ``recompute:50%`` half of them.
        written: the file it was read from, which errors about it name; no part of what it is.
        timing: by which it was predicted, and its stages were cut; no part of what it is.

    Example:
        >>> print(Plan.parse("pipeline(4) * data(2)", num_microbatches=8))
        pipeline(4) * data(2)
    """

    strategies: tuple[Strategy, ...] = ()
    num_microbatches: int = 1
    passes: tuple[str, ...] = ()
    source: PlanSource | None = field(default=None, compare=False, repr=False)
    profile: ModelProfile | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise PlanError(f"a plan needs at least 1 microbatch, not {self.num_microbatches}")
        for strategy in self.strategies:
            if strategy.degree < 1:
                raise PlanError(f"{strategy} spreads over {strategy.degree} ranks; give 1 or more")
        for strategy in self.strategies[:-1]:
            if isinstance(strategy, HAS_STEP_VARIANTS) and len(strategy.sync_schedule.step_fractions) > 1:
                raise PlanError(
                    f"{strategy} has steps that are not all alike, and {self.strategies[-1]} stands behind it; write "
                    "it last, outside of all that makes one replica"
                )
        self._require_one_pipeline()
        self._require_async_pipeline_alone()
        for name in self.passes:
            if name.partition(":")[0] not in KNOWN_PASSES or (":" in name and not name.startswith(RECOMPUTE_PASS)):
                raise PlanError(f"there is no pass {name!r}; the passes are {', '.join(KNOWN_PASSES)}")
        self._require_one_recomputation()

    def _require_one_pipeline(self) -> None:
        stages = [one for one in self.strategies if isinstance(one, Pipeline) and one.degree > 1]
        if len(stages) > 1:
            whole = prod(one.degree for one in stages)
            raise PlanError(
                f"{' * '.join(map(str, stages))} cuts a model into stages {len(stages)} times, and a plan has one "
                f"pipeline; give it all stages, pipeline({whole}), or take data for one of them"
            )

    def _require_async_pipeline_alone(self) -> None:
        for at, stream in enumerate(self.strategies):
            if not isinstance(stream, Pipeline) or not stream.is_async:
                continue
            inner, outer = self.strategies[:at], self.strategies[at + 1 :]
            around = [*(strategy for strategy in inner if isinstance(strategy, Data | Zero)), *outer]
            if around:
                slices = [strategy for strategy in (*inner, *outer) if isinstance(strategy, Tensor)]
                if all(isinstance(strategy, Tensor) for strategy in around):
                    raise PlanError(
                        f"{stream} has stages that update each for itself, and slices of layers stand inside of a "
                        f"stage; write {Plan((*slices, stream))}"
                    )
                times = prod(strategy.degree for strategy in around if isinstance(strategy, Data | Zero))
                alone = replace(stream, replicas=tuple(max(times, 2) * count for count in stream.stage_ranks))
                raise PlanError(
                    f"{stream} has stages that update each for itself, and {' and '.join(map(str, around))} would have "
                    f"all of them update together; give the stages replicas instead, {Plan((*slices, alone))}, or take "
                    "schedule=one_f_one_b"
                )

    def __str__(self) -> str:
        """Write the strategies as :meth:`parse` reads them.

        Microbatches and passes are no part of the text, also where ``chunks=`` said how many; :meth:`to_yaml` has all.
        """
        return " * ".join(map(str, self.strategies)) or "solo"

    @property
    def num_ranks(self) -> int:
        """How many ranks the plan needs."""
        ranks = 1
        for strategy in self.strategies:
            ranks = strategy.num_ranks(ranks)
        return ranks

    @property
    def global_num_microbatches(self) -> int:
        """Microbatches of the whole global batch."""
        return self.num_microbatches * prod(strategy.degree for strategy in self.strategies if strategy.splits_batch)

    def require_batch(self, batch_size: int) -> None:
        """Check that a global batch can be cut into microbatches of one size.

        Raises:
            PlanError: it cannot; the message has the nearest sizes that can.
        """
        if batch_size % self.global_num_microbatches:
            lower = batch_size - batch_size % self.global_num_microbatches
            sizes = f"{lower} or {lower + self.global_num_microbatches}" if lower else f"{self.global_num_microbatches}"
            with plan_error_at(self.source, "num_microbatches"):
                raise PlanError(
                    f"a batch of {batch_size} samples does not divide into the {self.global_num_microbatches} microbatches of "
                    f"{self} with num_microbatches={self.num_microbatches}; all microbatches of a full batch have one "
                    f"size: give batch_size={sizes}, or another number of microbatches"
                )

    def _require_one_recomputation(self) -> None:
        asked = [name for name in self.passes if name.partition(":")[0] == RECOMPUTE_PASS]
        stages = [one for one in self.strategies if isinstance(one, Pipeline) and one.recompute != "never"]
        if len(asked) + len(stages) > 1:
            ways = [*(f"recompute={one.recompute} of {one}" for one in stages), *(f"the pass {name}" for name in asked)]
            raise PlanError(f"{' and '.join(ways)} both say what is recomputed; leave out one of the two")

    @property
    def recomputation(self) -> Recomputation | None:
        """What is recomputed, as a pass or a pipeline says; None for nothing."""
        for name in self.passes:
            if name.partition(":")[0] == RECOMPUTE_PASS:
                return Recomputation.from_pass(name)
        stages = (strategy for strategy in self.strategies if isinstance(strategy, Pipeline))
        return next((asked for one in stages if (asked := Recomputation.from_mode(one.recompute)) is not None), None)

    @property
    def granularity(self) -> Granularity:
        """How finely the model has to be cut: as finely as what needs it finest; recomputing needs blocks."""
        order: tuple[Granularity, ...] = ("whole", "prefer_blocks", "blocks", "tensor_parallel")
        least: Granularity = "whole" if self.recomputation is None else "blocks"
        return max((least, *(strategy.granularity for strategy in self.strategies)), key=order.index)

    @property
    def split_modules(self) -> tuple[str, ...]:
        """The modules before which the model has to be cut, by their paths."""
        return tuple(
            cut for strategy in self.strategies if isinstance(strategy, Pipeline) for cut in strategy.split_modules
        )

    @property
    def sync_schedule(self) -> SyncSchedule:
        """Which kind of step comes when; only the last strategy may have steps that are not all alike."""
        last = self.strategies[-1] if self.strategies else None
        return last.sync_schedule if isinstance(last, HAS_STEP_VARIANTS) else SyncSchedule()

    @property
    def buckets(self) -> BucketConfig:
        """In which pieces gradients are summed while a backward goes on; what the last data parallelism says."""
        return next((one.buckets for one in reversed(self.strategies) if isinstance(one, Data)), DEFAULT_BUCKETS)

    def variant(self, kind: StepKind) -> Plan:
        """Return the plan whose program is that of one kind of step."""
        last = self.strategies[-1] if self.strategies else None
        return (
            replace(self, strategies=(*self.strategies[:-1], last.variant(kind)))
            if isinstance(last, HAS_STEP_VARIANTS)
            else self
        )

    @property
    def mesh(self) -> Mesh:
        """The axes of the plan, innermost first."""
        return Mesh(tuple(Axis(strategy.axis, strategy.degree) for strategy in self.strategies))

    def require_ranks(self, num_ranks: int) -> None:
        """Check that the plan is made for so many ranks.

        Raises:
            PlanError: it needs more or fewer; the message says how many along which axis.
        """
        if self.num_ranks != num_ranks:
            axes = self.mesh.describe()
            with plan_error_at(self.source, "strategy"):
                raise PlanError(
                    f"{self} needs {self.num_ranks} ranks ({axes}), but there {'is' if num_ranks == 1 else 'are'} "
                    f"{num_ranks}; start {self.num_ranks} ranks, or change the numbers in the plan"
                )

    @staticmethod
    def parse(
        text: str, *, num_ranks: int | None = None, num_microbatches: int | None = None, hosts: Sequence[int] = ()
    ) -> Plan:
        """Read a plan such as ``pipeline(4, schedule=gpipe) * data(2)``.

        Args:
            text: strategies joined by ``*``; a bare name takes the ranks it is given.
            num_ranks: the ranks there are, for a bare name; None when there is none.
            num_microbatches: microbatches of the innermost program; by default what ``chunks=`` says, or 1.
            hosts: the host of every rank, for systems that add up inside hosts first; all are on one by default.

        Raises:
            PlanError: the text is no plan, or names a strategy or option that does not exist, or says another number of
                microbatches.
        """
        count = resolve_microbatches(text, num_microbatches)
        pieces = text.split("*")
        starts = accumulate((len(piece) + 1 for piece in pieces), initial=0)
        terms = [parse_term(piece, start, text) for piece, start in zip(pieces, starts, strict=False)]
        terms = [(name, inside) for name, inside in terms if name != "solo"]
        bare = [name for name, inside in terms if inside is None]
        if len(bare) > 1:
            raise PlanError(f"{text!r} leaves the ranks of {' and '.join(bare)} open; give a number to all but one")
        if bare and num_ranks is None:
            raise PlanError(f"{text!r} does not say how many ranks {bare[0]} takes; write {bare[0]}(2), or give ranks")
        free = 1 if not bare else _infer_open_degree(terms, text, num_ranks or 1, hosts)
        strategies = build_strategies(
            [(name, str(free) if inside is None else inside) for name, inside in terms], text, hosts
        )
        if bare and free == 1 and len(terms) == 1 and bare[0] not in NEEDS_SERVERS:
            strategies = ()
        return Plan(strategies, count)

    def with_microbatches_for(self, batch_size: int, *, min_samples: int = 1) -> Plan:
        """Return the plan with as many microbatches as its pipeline can use, up to four for each stage.

        Args:
            batch_size: samples of a global batch.
            least: samples that a microbatch has at least, where the pipeline can do with so few microbatches.
        """
        stages = [strategy for strategy in self.strategies if isinstance(strategy, Pipeline)]
        if not stages:
            return self
        fewest = stages[0].usable_microbatches(1)
        for count in range(4 * stages[0].degree, fewest, -1):
            plan = replace(self, num_microbatches=count)
            fits = (
                batch_size % plan.global_num_microbatches == 0
                and batch_size >= min_samples * plan.global_num_microbatches
            )
            if fits and stages[0].usable_microbatches(count) == count:
                return plan
        return replace(self, num_microbatches=fewest)

    def to_yaml(self, profile: str = "") -> str:
        """Write the plan as YAML, as in ``plan.yaml`` of a run; ``timing`` is the file with its timing, beside it."""
        fields = {"strategy": str(self), "num_microbatches": self.num_microbatches, "passes": list(self.passes)}
        beside = {"profile": profile} if profile else {}
        return yaml.safe_dump({"plan": fields, "num_ranks": self.num_ranks, **beside}, sort_keys=False)

    @staticmethod
    def from_yaml(text: str, file: str = "") -> Plan:
        """Read what :meth:`to_yaml` wrote, edited or not; the plan remembers at which line its fields stand.

        Args:
            text: YAML with ``plan:``, and in it ``strategy:``; the rest may be left out.
            file: its name, for errors about the plan now and later; the file of a timing is looked for beside it.

        Raises:
            PlanError: a key is unknown or missing, or a value is of the wrong kind, or ``num_ranks`` is not what the
                strategy needs, or the timing cannot be read.
        """
        fields, written = parse_plan_file(text, file)
        given, passes = fields.get("num_microbatches", 1), fields.get("passes", [])
        wrong = "num_microbatches" if type(given) is not int else "passes"
        with written.error_at(wrong):
            if type(given) is not int or not isinstance(passes, list):
                raise PlanError(
                    f"num_microbatches must be a whole number and passes a list, not {given!r} and {passes!r}"
                )
        with written.error_at("num_microbatches"):
            Plan((), given)
        with written.error_at("passes"):
            Plan((), 1, tuple(map(str, passes)))
        with written.error_at("strategy"):
            said = given if "num_microbatches" in fields else None
            found = Plan.parse(str(fields["strategy"]), num_microbatches=said)
            plan = replace(found, passes=tuple(map(str, passes)), source=written)
        ranks = fields.get("num_ranks", plan.num_ranks)
        if ranks != plan.num_ranks:
            with written.error_at("num_ranks"):
                raise PlanError(
                    f"num_ranks is {ranks}, but {plan} in {written.location('strategy')} needs {plan.num_ranks}; change "
                    "the numbers of the strategy, or leave num_ranks out"
                )
        if "profile" not in fields:
            return plan
        with written.error_at("profile"):
            return replace(plan, profile=load_profile(Path(file).parent / str(fields["profile"])))

    @staticmethod
    def from_file(path: str | Path) -> Plan:
        """Read a plan file; see :meth:`from_yaml`.

        Raises:
            PlanError: it cannot be read, or :meth:`from_yaml` refuses it.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"the plan file {path} cannot be read: {error.strerror}; give an existing file") from None
        except UnicodeDecodeError:
            raise PlanError(f"the plan file {path} is not text in UTF-8; give a YAML file") from None
        return Plan.from_yaml(text, str(path))


def _num_ranks_for(terms: list[tuple[str, str | None]], degree: int, text: str, hosts: Sequence[int]) -> int:
    filled = [(name, str(degree) if inside is None else inside) for name, inside in terms]
    return Plan(build_strategies(filled, text, hosts)).num_ranks


def _infer_open_degree(terms: list[tuple[str, str | None]], text: str, num_ranks: int, hosts: Sequence[int]) -> int:
    """Return the number that makes the whole plan need so many ranks: what it needs grows evenly with it."""
    refused: PlanError | None = None
    before: int | None = None
    for free in range(1, num_ranks + 1):
        try:
            ranks = _num_ranks_for(terms, free, text, hosts)
        except PlanError as wrong:
            refused, before = wrong, None
            continue
        if ranks == num_ranks:
            return free
        if ranks > num_ranks:
            break
        if before is not None:
            more, rest = divmod(num_ranks - ranks, ranks - before)
            if rest == 0 and _num_ranks_for(terms, free + more, text, hosts) == num_ranks:
                return free + more
            break
        before = ranks
    if refused is not None:
        raise refused
    raise PlanError(f"{text!r} cannot take {num_ranks} ranks; the ranks of its strategies must multiply to it")
