"""The plan: which strategies, applied in which order, over how many microbatches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from pathlib import Path

import yaml

from counterpoint.errors import PlanError
from counterpoint.file_reader import read_regular_text
from counterpoint.model.compilation import Compilation, parse_compilation
from counterpoint.model.model_profile import ModelProfile, load_profile
from counterpoint.model.precision import Precision, parse_precision
from counterpoint.optim.validation import shorten
from counterpoint.plan.parser import build_strategies, parse_term, require_short_text, resolve_microbatches
from counterpoint.plan.registry import NEEDS_SERVERS
from counterpoint.plan.source import PlanSource, parse_plan_file, plan_error_at
from counterpoint.strategies.buckets import DEFAULT_BUCKETS, BucketConfig
from counterpoint.strategies.data import Data
from counterpoint.strategies.offload import OFFLOAD_PASS, Offloading
from counterpoint.strategies.options import PlanTextError
from counterpoint.strategies.output_gather import GATHER_OUTPUTS_PASS
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.recomputation import PARTITION_PASS, RECOMPUTE_PASS, Recomputation, parse_selector
from counterpoint.strategies.strategy import Granularity, Strategy
from counterpoint.strategies.sync_schedule import StepKind, SyncSchedule
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.zero import Zero
from counterpoint.world.mesh import Axis, Mesh

PREFETCH_PASS = "prefetch"
KNOWN_PASSES = ("overlap", RECOMPUTE_PASS, PARTITION_PASS, GATHER_OUTPUTS_PASS, PREFETCH_PASS, OFFLOAD_PASS)
PASSES_WITH_SELECTORS = (RECOMPUTE_PASS, PARTITION_PASS, PREFETCH_PASS, OFFLOAD_PASS)
"""Passes after whose name a colon and more may follow."""
DEFAULT_PASSES = ("overlap",)
"""The passes of a plan that is given as text without any."""

MICROBATCHES_PER_STAGE = 4
"""Microbatches per pipeline stage that are used if the batch allows; more reduce the bubble only a little."""


def require_pass_names(passes: object) -> None:
    """Check that passes are given as several names.

    Raises:
        PlanError: they are one text.
    """
    if isinstance(passes, str):
        raise PlanError(f"passes={shorten(passes)!r} is a text; give a tuple of names: ({shorten(passes)!r},)")


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model is trained in parallel: strategies, microbatches and compiler passes, as pure data.

    Args:
        strategies: applied from left to right, each spreading the program over one more axis.
        num_microbatches: number of microbatches of one replica; data-parallel strategies multiply it.
        passes: compiler passes, from ``overlap``, ``recompute``, ``partition_activations``, ``gather_outputs``,
            ``prefetch`` and ``offload``. ``recompute`` recomputes all blocks, ``recompute:*.attn`` those with matching
            module paths, ``recompute:50%`` half of them, ``recompute:blocks=0-3+7`` those with these numbers.
            ``partition_activations`` keeps ``1/n`` of the inputs that they are recomputed from on each rank of
            ``tensor(n)``, ``partition_activations:blocks=0-3`` those of some blocks. ``gather_outputs`` evaluates the
            loss once, on the outputs of the whole batch. ``prefetch`` lets the gathers and reductions of
            ``zero(n, level=3)`` run during computations, and starts gathers one computation before they are needed;
            ``prefetch:2`` two before. ``offload:state=disk`` keeps the optimizer state on disk between updates,
            ``offload:activations=disk`` the inputs that blocks are recomputed from until then
            (``offload:activations=disk:blocks=0-3`` those of some blocks), and ``offload:params=disk`` the shards of
            ``zero(n, level=3)`` between their uses.
        precision: what the model computes in; None for the dtype of its parameters.
        compile: how ``torch.compile`` compiles what ranks run of the model; None to run it eagerly.
        source: the plan file and its lines, for errors; not compared.
        profile: the measured profile by which its stages were chosen; not compared.

    Example:
        >>> print(Plan.parse("pipeline(4) * data(2)", num_microbatches=8))
        pipeline(4) * data(2)
    """

    strategies: tuple[Strategy, ...] = ()
    num_microbatches: int = 1
    passes: tuple[str, ...] = ()
    precision: Precision | None = None
    compile: Compilation | None = None
    source: PlanSource | None = field(default=None, compare=False, repr=False)
    profile: ModelProfile | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise PlanError(f"a plan needs at least 1 microbatch, not {self.num_microbatches}")
        for strategy in self.strategies:
            if strategy.degree < 1:
                raise PlanError(f"{strategy} has {strategy.degree} ranks; give 1 or more")
        for strategy in self.strategies[:-1]:
            if len(strategy.sync_schedule.step_fractions) > 1:
                raise PlanError(
                    f"{strategy} has several kinds of steps and must come last in a plan, but {self.strategies[-1]} "
                    "comes after it; write it last"
                )
        self._require_one_pipeline()
        self._require_stages_of_given_blocks()
        self._require_async_pipeline_alone()
        require_pass_names(self.passes)
        for name in self.passes:
            first = name.partition(":")[0]
            if first not in KNOWN_PASSES or (":" in name and first not in PASSES_WITH_SELECTORS):
                raise PlanError(f"there is no pass {shorten(repr(name))}; the passes are {', '.join(KNOWN_PASSES)}")
        self._require_one_recomputation()
        self._require_one_prefetch()
        self._require_one_offloading()

    def _require_one_pipeline(self) -> None:
        pipelines = [one for one in self.strategies if isinstance(one, Pipeline) and one.degree > 1]
        if len(pipelines) > 1:
            num_stages = prod(one.degree for one in pipelines)
            raise PlanError(
                f"{' * '.join(map(str, pipelines))} has {len(pipelines)} pipelines, and a plan can have one; give it "
                f"all stages, pipeline({num_stages}), or write data(...) instead of one of them"
            )

    def _require_stages_of_given_blocks(self) -> None:
        merging = [one for one in self.strategies if isinstance(one, Zero) and one.merged_by]
        for pipeline in self.strategies:
            if isinstance(pipeline, Pipeline) and pipeline.degree > 1 and merging:
                raise PlanError(
                    f"{merging[0]} merges the blocks that the stages of {pipeline} are made of; leave out "
                    f"{merging[0].merged_by}"
                )

    def _require_async_pipeline_alone(self) -> None:
        for index, pipeline in enumerate(self.strategies):
            if not isinstance(pipeline, Pipeline) or not pipeline.is_async:
                continue
            inner, outer = self.strategies[:index], self.strategies[index + 1 :]
            others = [*(strategy for strategy in inner if isinstance(strategy, Data | Zero)), *outer]
            if others:
                tensors = [strategy for strategy in (*inner, *outer) if isinstance(strategy, Tensor)]
                if all(isinstance(strategy, Tensor) for strategy in others):
                    raise PlanError(
                        f"the stages of {pipeline} update independently, so tensor parallelism must be inside a stage; "
                        f"write {Plan((*tensors, pipeline))}"
                    )
                degree = prod(strategy.degree for strategy in others if isinstance(strategy, Data | Zero))
                replicated = replace(pipeline, replicas=tuple(max(degree, 2) * num for num in pipeline.stage_ranks))
                raise PlanError(
                    f"the stages of {pipeline} update independently, but {' and '.join(map(str, others))} needs all of "
                    f"them to update together; replicate the stages instead, {Plan((*tensors, replicated))}, or give "
                    "schedule=one_f_one_b"
                )

    def _require_one_recomputation(self) -> None:
        passes = [name for name in self.passes if name.partition(":")[0] == RECOMPUTE_PASS]
        pipelines = [one for one in self.strategies if isinstance(one, Pipeline) and one.recompute != "never"]
        if len(passes) + len(pipelines) > 1:
            requests = [f"recompute={one.recompute} of {one}" for one in pipelines]
            requests += [f"the pass {name}" for name in passes]
            raise PlanError(f"{' and '.join(requests)} both say what is recomputed; drop one of the two")
        partitions = [name for name in self.passes if name.partition(":")[0] == PARTITION_PASS]
        if len(partitions) > 1:
            raise PlanError(
                f"the passes {' and '.join(partitions)} both say which inputs are partitioned; drop one of the two, or "
                f"join their blocks, as in {PARTITION_PASS}:blocks=0-3+7"
            )

    def _require_one_prefetch(self) -> None:
        passes = [name for name in self.passes if name.partition(":")[0] == PREFETCH_PASS]
        if len(passes) > 1:
            raise PlanError(f"the passes {' and '.join(passes)} both say how early gathers start; drop one of the two")
        for name in passes:
            _, colon, depth = name.partition(":")
            if colon and not re.fullmatch(r"[0-9]{1,6}", depth):
                raise PlanError(
                    f"the pass {shorten(repr(name))} does not say how many computations before their use gathers "
                    "start; write prefetch for one, prefetch:2 for two, or prefetch:0, which is as without it"
                )

    def _require_one_offloading(self) -> None:
        offloading = self.offloading
        if offloading is not None and offloading.activations and self.recomputation is None:
            raise PlanError(
                f"offload:activations={offloading.activations} offloads the inputs that blocks are recomputed from, "
                "but nothing is recomputed; add the pass recompute, or give the pipeline recompute=always"
            )
        is_for_all = self.partition_selector == "" or (offloading is not None and not offloading.selector)
        if offloading is not None and offloading.activations and self.partition_selector is not None and is_for_all:
            raise PlanError(
                f"the passes {PARTITION_PASS} and offload:activations={offloading.activations} both say where the "
                "inputs are that blocks are recomputed from; drop one of the two, or give each blocks of its "
                f"own, as in {PARTITION_PASS}:blocks=0-3"
            )

    def __str__(self) -> str:
        """Write the strategies as :meth:`parse` reads them.

        The number of microbatches and the passes are not part of the text, even if ``chunks=`` gave the former;
        :meth:`to_yaml` has all.
        """
        return " * ".join(map(str, self.strategies)) or "solo"

    @property
    def num_ranks(self) -> int:
        """Number of ranks that the plan needs."""
        ranks = 1
        for strategy in self.strategies:
            ranks = strategy.num_ranks(ranks)
        return ranks

    @property
    def global_num_microbatches(self) -> int:
        """Number of microbatches of the global batch, over all replicas."""
        return self.num_microbatches * prod(strategy.degree for strategy in self.strategies if strategy.splits_batch)

    def require_batch(self, batch_size: int, *, is_own_loop: bool = False) -> None:
        """Check that a global batch can be split into microbatches of equal size.

        Args:
            batch_size: samples of the global batch.
            is_own_loop: whether a loop of the user's gives the batches, so that there is no ``batch_size`` to change.

        Raises:
            PlanError: it cannot; the message has the nearest sizes that can.
        """
        count = self.global_num_microbatches
        if batch_size % count:
            lower = batch_size - batch_size % count
            sizes = f"{lower} or {lower + count}" if lower else f"{count}"
            remedy = f"call the step with {sizes} samples in all" if is_own_loop else f"give batch_size={sizes}"
            with plan_error_at(self.source, "num_microbatches"):
                raise PlanError(
                    f"a batch of {batch_size} samples cannot be split into the {count} equal microbatches of {self} "
                    f"with num_microbatches={self.num_microbatches}; {remedy}, or give another num_microbatches"
                )

    @property
    def recomputation(self) -> Recomputation | None:
        """What a pass or a pipeline recomputes; None for nothing."""
        for name in self.passes:
            if name.partition(":")[0] == RECOMPUTE_PASS:
                return Recomputation.from_pass(name)
        modes = (Recomputation.from_mode(one.recompute) for one in self.strategies if isinstance(one, Pipeline))
        return next((mode for mode in modes if mode is not None), None)

    @property
    def partition_selector(self) -> str | None:
        """The blocks of whose inputs ranks keep parts, as text; empty for all, None for none."""
        names = (name for name in self.passes if name.partition(":")[0] == PARTITION_PASS)
        return next((parse_selector(name, PARTITION_PASS) for name in names), None)

    @property
    def prefetch_depth(self) -> int:
        """How many computations before their use gathers of sharded weights start; 0 without the pass ``prefetch``."""
        names = (name.partition(":") for name in self.passes)
        return next((int(depth or 1) for name, _, depth in names if name == PREFETCH_PASS), 0)

    @property
    def offloading(self) -> Offloading | None:
        """What a pass offloads; None for nothing."""
        names = [name for name in self.passes if name.partition(":")[0] == OFFLOAD_PASS]
        return Offloading.from_passes(names) if names else None

    @property
    def granularity(self) -> Granularity:
        """How finely the model has to be split: the finest that a strategy needs; recomputation needs blocks."""
        from_coarse_to_fine: tuple[Granularity, ...] = ("whole", "prefer_blocks", "blocks", "tensor_parallel")
        least: Granularity = "whole" if self.recomputation is None else "blocks"
        return max((least, *(strategy.granularity for strategy in self.strategies)), key=from_coarse_to_fine.index)

    @property
    def split_modules(self) -> tuple[str, ...]:
        """Paths of the modules before which the model has to be split."""
        return tuple(module for strategy in self.strategies for module in strategy.split_modules)

    @property
    def sync_schedule(self) -> SyncSchedule:
        """Which kind of step is taken when; only the last strategy may have several kinds."""
        last = self.strategies[-1] if self.strategies else None
        return SyncSchedule() if last is None else last.sync_schedule

    @property
    def buckets(self) -> BucketConfig:
        """Bucket sizes of the outermost data parallelism."""
        return next((one.buckets for one in reversed(self.strategies) if isinstance(one, Data)), DEFAULT_BUCKETS)

    def variant(self, kind: StepKind) -> Plan:
        """Return the plan whose program is that of one kind of step."""
        if kind == "step":
            return self
        *inner, last = self.strategies
        return replace(self, strategies=(*inner, last.variant(kind)))

    @property
    def mesh(self) -> Mesh:
        """The axes of the plan, innermost first."""
        return Mesh(tuple(Axis(strategy.axis, strategy.degree) for strategy in self.strategies))

    def require_ranks(self, num_ranks: int) -> None:
        """Check that the plan is for a number of ranks.

        Raises:
            PlanError: it needs more or fewer; the message has the degree of each axis.
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
        """Parse a plan such as ``pipeline(4, schedule=gpipe) * data(2)``.

        Args:
            text: strategies joined by ``*``; one of them may omit its number of ranks.
            num_ranks: number of ranks of the whole plan, from which an omitted number is inferred.
            num_microbatches: number of microbatches of one replica; by default the value of ``chunks=``, or 1.
            hosts: the host of every rank, for systems that reduce within hosts first; by default all are on one host.

        Raises:
            PlanError: the text is not a plan, is longer than 10,000 characters, names a strategy or option that does
                not exist, or contradicts ``num_microbatches``.
        """
        require_short_text(text)
        count = resolve_microbatches(text, num_microbatches)
        try:
            strategies = _parse_strategies(text, num_ranks, hosts)
        except PlanTextError as error:
            raise error.in_text(text) from None
        return Plan(strategies, count)

    def with_microbatches_for(self, batch_size: int, *, min_samples: int = 1) -> Plan:
        """Return the plan with the largest number of microbatches that its pipeline can use, up to four per stage.

        Args:
            batch_size: number of samples of a global batch.
            min_samples: minimum samples of a microbatch, unless the pipeline needs more microbatches.
        """
        pipeline = next((strategy for strategy in self.strategies if isinstance(strategy, Pipeline)), None)
        if pipeline is None:
            return self
        fewest = pipeline.usable_microbatches(1)
        for count in range(MICROBATCHES_PER_STAGE * pipeline.degree, fewest, -1):
            plan = replace(self, num_microbatches=count)
            num_micros = plan.global_num_microbatches
            fits = batch_size % num_micros == 0 and batch_size >= min_samples * num_micros
            if fits and pipeline.usable_microbatches(count) == count:
                return plan
        return replace(self, num_microbatches=fewest)

    def with_microbatches_of(self, num_batches: int) -> Plan:
        """Return the plan with a multiple of its microbatches, so that there is one for each of several batches."""
        return replace(self, num_microbatches=self.num_microbatches * -(-num_batches // self.global_num_microbatches))

    def to_yaml(self, profile: str = "") -> str:
        """Write the plan as YAML, as in a run's ``plan.yaml``.

        Args:
            profile: name of the file with the plan's profile, in the same folder; empty for none.
        """
        fields = {"strategy": str(self), "num_microbatches": self.num_microbatches, "passes": list(self.passes)}
        for name, value in (("precision", self.precision), ("compile", self.compile)):
            fields |= {} if value is None else {name: str(value)}
        extra = {"profile": profile} if profile else {}
        return yaml.safe_dump({"plan": fields, "num_ranks": self.num_ranks, **extra}, sort_keys=False)

    @staticmethod
    def from_yaml(text: str, file: str = "") -> Plan:
        """Parse the output of :meth:`to_yaml`, edited or not; the plan remembers the lines of its fields.

        Args:
            text: YAML with ``plan:``, and in it ``strategy:``; everything else is optional.
            file: its name, for errors now and later; the file of a profile is in the same folder.

        Raises:
            PlanError: a key is unknown or missing, a value has the wrong type, ``num_ranks`` differs from what the
                strategy needs, or the profile cannot be read.
        """
        fields, source = parse_plan_file(text, file)
        count, passes = fields.get("num_microbatches", 1), fields.get("passes", [])
        wrong = "num_microbatches" if type(count) is not int else "passes"
        with source.error_at(wrong):
            if type(count) is not int or not isinstance(passes, list):
                raise PlanError(
                    "num_microbatches must be a whole number and passes a list, not "
                    f"{shorten(repr(count))} and {shorten(repr(passes))}"
                )
        with source.error_at("num_microbatches"):
            Plan((), count)
        with source.error_at("passes"):
            Plan((), 1, tuple(map(str, passes)))
        with source.error_at("precision"):
            precision = parse_precision(fields.get("precision"))
        with source.error_at("compile"):
            compilation = parse_compilation(fields.get("compile"))
        with source.error_at("strategy"):
            given = count if "num_microbatches" in fields else None
            parsed = Plan.parse(str(fields["strategy"]), num_microbatches=given)
            given_passes = tuple(map(str, passes))
            plan = replace(parsed, passes=given_passes, precision=precision, compile=compilation, source=source)
        num_ranks = fields.get("num_ranks", plan.num_ranks)
        if num_ranks != plan.num_ranks:
            with source.error_at("num_ranks"):
                raise PlanError(
                    f"num_ranks is {shorten(str(num_ranks))}, but {plan} in {source.location('strategy')} needs "
                    f"{plan.num_ranks}; change the numbers of the strategy, or drop num_ranks"
                )
        if "profile" not in fields:
            return plan
        with source.error_at("profile"):
            return replace(plan, profile=load_profile(Path(file).parent / str(fields["profile"])))

    @staticmethod
    def from_file(path: str | Path) -> Plan:
        """Read a plan file; see :meth:`from_yaml`.

        Raises:
            PlanError: it cannot be read, or :meth:`from_yaml` rejects it.
        """
        try:
            text = read_regular_text(Path(path))
        except OSError as error:
            raise PlanError(f"the plan file {path} cannot be read: {error.strerror}; give an existing file") from None
        except UnicodeDecodeError:
            raise PlanError(f"the plan file {path} is not UTF-8 text; give a YAML file") from None
        return Plan.from_yaml(text, str(path))


def _parse_strategies(text: str, num_ranks: int | None, hosts: Sequence[int]) -> tuple[Strategy, ...]:
    terms_text = text.split("*")
    starts = accumulate((len(term) + 1 for term in terms_text), initial=0)
    terms = [parse_term(term, start) for term, start in zip(terms_text, starts, strict=False)]
    terms = [(name, arguments) for name, arguments in terms if name != "solo"]
    without_degree = [name for name, arguments in terms if arguments is None]
    if len(without_degree) > 1:
        raise PlanError(f"{text!r} omits the ranks of {' and '.join(without_degree)}; give a number to all but one")
    if without_degree and num_ranks is None:
        raise PlanError(
            f"{text!r} omits the ranks of {without_degree[0]}; write {without_degree[0]}(2), or give num_ranks"
        )
    degree = _infer_open_degree(terms, num_ranks or 1, hosts) if without_degree else 1
    if degree is None:
        raise PlanError(
            f"{text!r} cannot use {num_ranks} ranks; the ranks of its strategies must multiply to that number"
        )
    if without_degree and degree == 1 and len(terms) == 1 and without_degree[0] not in NEEDS_SERVERS:
        return ()
    return build_strategies(_with_degree(terms, degree), hosts)


def _with_degree(terms: list[tuple[str, str | None]], degree: int) -> list[tuple[str, str]]:
    return [(name, str(degree) if arguments is None else arguments) for name, arguments in terms]


def _infer_open_degree(terms: list[tuple[str, str | None]], num_ranks: int, hosts: Sequence[int]) -> int | None:
    """Return the omitted degree with which the whole plan needs ``num_ranks``, or None if no degree gives that number.

    The number of ranks is an affine function of the degree (servers add a constant), so that two degrees that are valid
    predict all others.
    """

    def num_ranks_for(degree: int) -> int:
        return Plan(build_strategies(_with_degree(terms, degree), hosts)).num_ranks

    last_error: PlanError | None = None
    previous: int | None = None
    for degree in range(1, num_ranks + 1):
        try:
            ranks = num_ranks_for(degree)
        except PlanError as error:
            last_error, previous = error, None
            continue
        if ranks == num_ranks:
            return degree
        if ranks > num_ranks:
            break
        if previous is not None:
            more, rest = divmod(num_ranks - ranks, ranks - previous)
            if rest == 0 and num_ranks_for(degree + more) == num_ranks:
                return degree + more
            break
        previous = ranks
    if last_error is not None:
        raise last_error
    return None
