"""Training steps for a user's own training loop: ``parallelize`` returns one that trains on a batch under any plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from torch import Tensor, nn, optim

from counterpoint.compiler.compile import CompiledPlan
from counterpoint.data.batch_form import as_inputs, split_targets
from counterpoint.data.sampler import split_batch
from counterpoint.errors import DataError, PlanError
from counterpoint.fabric.fingerprint import format_ranks
from counterpoint.launchers.environment import RankEnvironment, detect
from counterpoint.launchers.signals import STOP_SIGNALS, collect_signals
from counterpoint.optim.validation import checked_call, renamed_hint
from counterpoint.partitioning.pytree import register_dataclasses
from counterpoint.runtime.commit.device_commit import LateResult
from counterpoint.runtime.commit.step_commit import StepResult
from counterpoint.runtime.loss.loss_reduction import LossFunction
from counterpoint.runtime.microbatches import (
    AccumulatedBatches,
    KeptBatch,
    MicrobatchSource,
    SlicedBatch,
    slice_samples,
)
from counterpoint.runtime.sample_layout import SampleLayout
from counterpoint.terminal_text import warn
from counterpoint.training.agreement.rank_facts import CallFacts, NamedFacts, describe_arguments, describe_ranks
from counterpoint.training.agreement.step_facts import describe_form
from counterpoint.training.batches.global_batch import (
    batch_digest,
    committed_microbatches,
    count_samples,
    make_global_batch,
    require_full_batch,
    warn_forked_workers,
)
from counterpoint.training.batches.per_rank import PerRankBatchExchange, require_synchronous_steps
from counterpoint.training.distributed_world import DistributedWorld, has_remote_ranks, open_world, sibling_world
from counterpoint.training.initialization.materialize import begin_model, describe_sources
from counterpoint.training.model_checks.validation import (
    OptimizerArgument,
    min_microbatch_size,
    require_loss_function,
    warn_of_evaluation_mode,
    wrap_optimizer,
)
from counterpoint.training.options import RENAMED_VALUES
from counterpoint.training.plan_resolution import (
    MAX_TRACE_SAMPLES,
    AutoStrategy,
    RequestedPlan,
    StrategyArgument,
    make_auto_strategy,
    parse_options,
    resolve_initial_plan,
)
from counterpoint.training.ranks.local_ranks import LocalRanks, abort_training
from counterpoint.training.ranks.placement import place_model
from counterpoint.training.recording import ONE_RANK, record_call

if TYPE_CHECKING:
    from counterpoint.training.callbacks.loop_reporter import LoopReporter
    from counterpoint.training.checkpointing.loop_checkpoints import LoopCheckpoints

NO_TARGETS = object()
"""In place of targets that were not given."""
RENAMED_METHODS = {"give_back": "export_weights", "take": "import_weights"}
"""Former names of methods of :class:`TrainStep`."""
PARTS_OF_STEP = frozenset({"forward", "backward", "zero_grad"})
"""What a plain loop calls, and ranks run as one program."""


class TrainStep:
    """A training step: called with a global batch, it returns the mean loss over it.

    Every rank passes the same batch and computes its own part of it, or passes samples of its own if
    :func:`parallelize` was called with ``batches="per_rank"``. Close the step, or use it in a ``with`` block, when
    training is over; the model then has the trained weights. A step that raises is skipped if all ranks are in this
    process, and others may follow; an asynchronous pipeline then drops its batches in flight.

    Under an asynchronous pipeline (pipedream) a call updates with the batch whose loss it returns, at the learning rate
    of this call: step a scheduler after calls that have returned a loss, and in ``flush(after=scheduler.step)``.
    Batches in flight are copies, so that a loop may fill the tensors of one with the next.

    Args:
        local_ranks: the ranks.
        has_fixed_microbatches: whether the number of microbatches was given.
        auto_strategy: the choice of the plan, if it is made with the first batch.
        batch_exchange: exchanges the ranks' own batches, if each process passes its own.
        plan_facts: what was asked for, to be compared with other processes.
        run_folder: gets a report of every step.

    Attributes:
        loss_parts: of a loss that is a dict, the mean of each entry over the batch of the last call.
    """

    def __init__(
        self,
        local_ranks: LocalRanks,
        *,
        has_fixed_microbatches: bool,
        auto_strategy: AutoStrategy | None = None,
        batch_exchange: PerRankBatchExchange | None = None,
        plan_facts: NamedFacts = (),
        run_dir: str | Path | None = None,
    ) -> None:
        self.local_ranks = local_ranks
        self.plan_facts = plan_facts
        self.auto_strategy = auto_strategy
        self.batch_exchange = batch_exchange
        self.reporter = None if run_dir is None else make_reporter(local_ranks, run_dir)
        options = local_ranks.options
        self.sample_layout = SampleLayout(local_ranks.model, options.batch_dims or {}, options.shared)
        self.number = 0
        self.loss_parts: dict[str, float] = {}
        self.result: StepResult | LateResult = StepResult(math.nan, 0, math.nan, 1.0, "")  # of the last step
        self.open_contexts = ExitStack()  # until it is closed
        self.watches_signals = False
        self.has_fixed_microbatches = has_fixed_microbatches
        self.is_closed = False
        self.is_multi_process = False  # whether other processes have ranks, too
        self.committed_microbatches: list[int] = []
        self.accumulated: list[KeptBatch] = []  # batches for the next update()
        self.known_pids: set[int] = set()  # child processes that were checked
        self.has_warned_of_fork = False  # of forked workers

    def __call__(self, inputs: Any, targets: Any = NO_TARGETS) -> float:  # noqa: ANN401 - whatever model and loss take
        """Train on one global batch: ``step(inputs, targets)``, or ``step(batch)`` for one that has both.

        Args:
            inputs: a tensor, or a tuple, a dict or another nest of tensors, with the samples along dim 0, or a list
                with an entry for each sample; ``batch_dims=`` and ``shared=`` name what is different. Without targets
                it is a batch: a tuple ``(inputs..., target)``, a dict, of which the model gets keyword arguments and
                the loss ``labels``, or another nest.
            targets: likewise, for the loss.

        Returns:
            The mean loss over the batch of all ranks, before the update. Under an asynchronous pipeline (pipedream),
            that of the batch that has passed all stages, some calls after its own one, and nan before there is one.
            On a device it is a number that waits for the device when it is used; ``float(loss)`` is a plain one.

        Raises:
            PlanError: the step is closed.
            DataError: inputs and targets differ in length, ranks in the size of their batches; or the model's weights
                were changed in between, and the ranks train copies of them: see :meth:`import_weights`.
        """
        batch = self.parse_batch(inputs, targets)
        if self.accumulated:
            raise DataError(
                f"step {self.number} was called with a batch while {len(self.accumulated)} are accumulated; give this "
                "one to accumulate(batch), too, and call update()"
            )
        if self.batch_exchange is not None:
            return self.step_with_rank_batch(self.batch_exchange, batch)
        return self.train([KeptBatch(batch)])

    def accumulate(self, inputs: Any, targets: Any = NO_TARGETS) -> None:  # noqa: ANN401 - of any form
        """Keep a copy of a batch for the next :meth:`update`, which trains on all that were kept.

        Args:
            inputs: as for a call of the step.
            targets: likewise.

        Raises:
            PlanError: the step is closed, or each process passes its own batches.

        Example:
            >>> import torch
            >>> model, loss = nn.Linear(2, 1), nn.functional.mse_loss
            >>> with parallelize(model, optim.SGD(model.parameters(), lr=0.1), loss, strategy="data(2)") as step:
            ...     for length in (4, 2, 6):
            ...         step.accumulate(torch.ones(length, 2), torch.zeros(length, 1))
            ...     loss = step.update()
        """
        batch = self.parse_batch(inputs, targets)
        if self.batch_exchange is not None:
            raise PlanError(
                "accumulate() takes global batches, but batches='per_rank' was given; pass the samples of several "
                "batches in one call, which num_microbatches=K computes in K parts, or omit batches"
            )
        self.accumulated.append(KeptBatch.copy(batch))

    def update(self) -> float:
        """Train on the accumulated batches in one step, as on one batch with all their samples.

        A microbatch never has samples of two batches, so that their shapes may differ. The first update sets the number
        of microbatches, unless ``num_microbatches`` was given; later ones may be of fewer batches.

        Returns:
            The mean loss over the samples, tokens or weights of all of them.

        Raises:
            DataError: no batch was accumulated, or more than there are microbatches.
        """
        if not self.accumulated:
            raise DataError(
                "update() has no batch to train on; call accumulate(batch) for each one before, or pass one to the "
                "step itself"
            )
        batches, self.accumulated = self.accumulated, []
        return self.train(batches)

    def parse_batch(self, inputs: Any, targets: Any) -> tuple[Any, Any]:  # noqa: ANN401 - of any form
        """Return the inputs and targets of a batch of any form, with marks where samples do not lie along dim 0.

        Raises:
            PlanError: the step is closed.
        """
        if self.is_closed:
            raise PlanError(
                f"step {self.number} was called after close(); close when training is over, and call parallelize(...) "
                "again to train further"
            )
        if targets is NO_TARGETS:
            inputs, targets = split_targets(inputs, self.sample_layout.arguments)
        elif isinstance(inputs, Mapping):
            inputs = as_inputs(inputs)
        if self.local_ranks.compiled is None:
            register_dataclasses((inputs, targets))
        return self.sample_layout.mark(inputs, targets)

    def train(self, batches: Sequence[KeptBatch]) -> float:
        """Take one step on the samples of some global batches, and return its loss as :meth:`submit` does.

        Raises:
            DataError: there are more batches than microbatches.
        """
        counts = [count_samples(*batch.values) for batch in batches]
        if self.local_ranks.compiled is None:
            self.build([batch.values for batch in batches], counts)
        num_microbatches = self.local_ranks.global_num_microbatches
        if len(batches) == 1:
            return self.submit(make_global_batch(batches[0], counts[0], num_microbatches))
        if len(batches) > num_microbatches:
            raise DataError(
                f"{len(batches)} batches were accumulated, but a step under {self.local_ranks.plan} has "
                f"{num_microbatches} microbatches, as the first one needed, or num_microbatches says; accumulate the "
                "most in the first update, or give num_microbatches"
            )
        shares = [stop - start for start, stop in split_batch(num_microbatches, len(batches))]
        return self.submit(AccumulatedBatches(list(map(make_global_batch, batches, counts, shares))))

    def submit(self, batch: MicrobatchSource) -> float:
        """Start a batch; return the loss of the batch that was finished: this one, unless several are in flight."""
        flight = self.local_ranks.in_flight
        flight.batches[self.number] = batch.keep() if flight.lookahead and isinstance(batch, SlicedBatch) else batch
        loss = self.run_step(self.number - flight.lookahead)
        self.number += 1
        return loss

    def run_step(self, number: int) -> float:
        """Take the step that finishes the batch of this number; return its loss, nan if there is no batch."""
        if (self.is_multi_process or self.batch_exchange is not None) and not self.has_warned_of_fork:
            # a DataLoader starts new workers in every epoch
            self.has_warned_of_fork = warn_forked_workers(self.known_pids)
        in_flight = self.local_ranks.in_flight
        with self.local_ranks.accelerator.preserve_rng(enabled=self.local_ranks.uses_rng):
            if self.reporter is None:
                result = self.local_ranks.step(number, in_flight.batch_source(number))
            else:
                result = self.reporter.take_step(number)
        batch = in_flight.batches.pop(number, None)
        if self.is_multi_process and isinstance(batch, SlicedBatch | AccumulatedBatches):
            rank = self.local_ranks.world.fabrics[0].rank
            require_full_batch(rank, number, result.num_samples, batch, self.committed_microbatches)
        self.local_ranks.optimizer_spec.after_step(lambda: not result.skip_reason)
        self.result = result
        self.loss_parts = {name: part.mean for name, part in result.loss_parts.items()}
        return result.loss  # type: ignore[return-value]  # on a device a LateNumber, which is used as a float

    def step_with_rank_batch(self, batch_exchange: PerRankBatchExchange, batch: tuple[Any, Any]) -> float:
        """Train on the batches of all ranks, including this one's, and return their mean loss."""
        count, is_first = count_samples(*batch, may_be_empty=True), self.local_ranks.compiled is None
        if is_first:
            self.require_same_ranks()
        infos = batch_exchange.exchange_info(
            self.number, count, content_digest=batch_digest(*batch) if is_first else ""
        )
        if is_first:
            self.build_for_rank_batches(batch_exchange, batch, [info.count for info in infos])
        batch_exchange.check_batches(self.number, infos)
        return self.submit(batch_exchange.make_batch(batch, infos))

    def build_for_rank_batches(
        self, batch_exchange: PerRankBatchExchange, batch: tuple[Any, Any], counts: list[int]
    ) -> None:
        """Build the ranks for batches that processes bring.

        Raises:
            DataError: a rank has no sample to build the model with.
        """
        ranks = self.local_ranks
        if 0 in counts:
            raise DataError(
                f"{format_ranks([rank for rank, count in enumerate(counts) if not count])} brought no sample to the "
                "first step, with which every rank builds the model; give each one sample or more in its first batch"
            )
        global_size = max(counts) * (ranks.plan.global_num_microbatches // ranks.plan.num_microbatches)
        self.resolve_plan(partial(slice_samples, batch[0], 0, min(*counts, MAX_TRACE_SAMPLES)), global_size)
        ranks.plan.require_batch(global_size, is_own_loop=True)
        size = split_batch(global_size, ranks.plan.global_num_microbatches)[0][1]
        part, own = slice_samples(batch[0], 0, min(*counts, size)), counts[ranks.world.fabrics[0].rank]
        whole = make_global_batch(batch, own, 1)
        undivided = partial(whole.undivided, 0)
        with self.restore_after_build(), ranks.explain_build(part, min(*counts, size), undivided):
            compiled = ranks.build(part, size, undivided)
        batch_exchange.set_program(compiled.step_variants[-1].program)

    def should_stop(self) -> bool:
        """Return whether SIGTERM or SIGUSR1 has asked the last step to be the last one; the same on all ranks.

        The first call replaces the default actions of these signals, which end the process at once, until the step is
        closed. So a loop that calls it after each step, on all ranks, has the time to save and to end. It costs no
        message, unless ranks commit in several groups (asynchronous pipelines and servers).

        Example:
            >>> import torch
            >>> model, loss = nn.Linear(2, 1), nn.functional.mse_loss
            >>> with parallelize(model, optim.SGD(model.parameters(), lr=0.1), loss, strategy="data(2)") as step:
            ...     for _ in range(3):
            ...         loss = step(torch.ones(4, 2), torch.zeros(4, 1))
            ...         if step.should_stop():
            ...             break
        """
        if not self.watches_signals:
            self.watches_signals = True
            self.open_contexts.enter_context(
                collect_signals(STOP_SIGNALS, self.local_ranks.stop_signals, replaced="defaults")
            )
        ranks = self.local_ranks
        return bool(ranks.stop_signal_of(self.result) if ranks.knows_stop_signal else ranks.exchange_stop_signals()[0])

    def finish(self) -> None:
        """Take part, without samples, in the steps of ranks that have some left, until all ranks have called this.

        To be called where a rank's loop over its own batches ends, once in each epoch for instance;
        :meth:`export_weights`, :meth:`mean` and :meth:`close` call it. If all ranks pass the same batches, it does
        nothing.

        Raises:
            DataError: ranks may not have different numbers of batches.
        """
        while self.batch_exchange is not None and not self.is_closed:
            if self.local_ranks.compiled is None:
                self.require_same_ranks()
            infos = self.batch_exchange.exchange_info(self.number, 0, is_done=True)
            if all(info.is_done for info in infos):
                return
            if self.local_ranks.compiled is None:
                self.build_for_rank_batches(self.batch_exchange, ((), ()), [info.count for info in infos])
            self.batch_exchange.check_batches(self.number, infos)
            self.submit(self.batch_exchange.make_batch(None, infos))

    def mean(self, value: float, count: int = 1) -> float:
        """Return the mean of a value over all ranks, weighted by their counts; a collective call.

        What each rank has measured on its own part of held-out data becomes one figure, however uneven the parts are.

        Args:
            value: this rank's mean; ignored if ``count`` is 0.
            count: of how many samples.

        Returns:
            The mean over the samples of all ranks; nan if there are none.
        """
        self.finish()
        fabric = self.local_ranks.world.fabrics[0]
        terms: list[Any] = [[value if count else 0.0, count]]
        if has_remote_ranks(self.local_ranks.world):
            terms = list(fabric.gather_values("mean", terms[0], tuple(range(fabric.num_ranks))))
        total = sum(term_count for _, term_count in terms)
        return math.fsum(mean * term_count for mean, term_count in terms) / total if total else math.nan

    def flush(self, after: Callable[[], object] | None = None) -> list[float]:
        """Finish the batches in flight and return their losses; empty under a plan that flushes after every step.

        Under pipedream and pipedream_2bw the next batches start with the newest weights, as the first ones did.

        Args:
            after: called after each of these batches, ``scheduler.step`` for instance; by default all are updated at
                the current learning rate.
        """
        in_flight, losses = self.local_ranks.in_flight, []
        for number in range(self.number - in_flight.lookahead, self.number) if in_flight.batches else ():
            has_batch = number in in_flight.batches
            loss = self.run_step(number)
            losses += [loss] if has_batch else []
            if has_batch and after is not None:
                after()
        return losses

    def require_same_ranks(self, data: NamedFacts = ()) -> None:
        """Check before the first step that all processes train the same model; a collective call.

        Args:
            data: what identifies the batch, if all have the same one.

        Raises:
            PlanError: they do not.
            DataError: they have other batches.
        """
        ranks, exchange = self.local_ranks, self.batch_exchange
        options = {"batches": "global"} if exchange is None else {"batches": "per_rank", "uneven": exchange.uneven}
        call = CallFacts([["the call", "parallelize"], *describe_arguments(options)], data)
        own = describe_ranks(ranks.model, self.plan_facts, self.optimizer, ranks.loss, ranks.options)
        call.require_same(ranks.world.fabrics[0], own)

    def build(self, batches: Sequence[tuple[Any, Any]], counts: Sequence[int]) -> None:
        """Build the ranks for steps on batches like these, which have so many samples."""
        local_ranks, inputs, count = self.local_ranks, batches[0][0], counts[0]
        fabric = local_ranks.world.fabrics[0]
        warn_of_evaluation_mode(local_ranks.model)
        self.is_multi_process = has_remote_ranks(local_ranks.world)
        if self.is_multi_process:
            facts = [
                ["the size of the batch", f"{sum(counts)} samples"],
                ["the form of the batch", describe_form(tuple(batches) if len(batches) > 1 else batches[0])],
                ["the content of the batch", f"digest {batch_digest(*batches)}"],
            ]
            self.require_same_ranks(facts)
        self.resolve_plan(partial(slice_samples, inputs, 0, min(count, MAX_TRACE_SAMPLES)), count, batches[0])
        if len(batches) == 1:
            local_ranks.plan.require_batch(count, is_own_loop=True)
        elif not self.has_fixed_microbatches:
            local_ranks.use_plan(local_ranks.plan.with_microbatches_of(len(batches)))
        _, share = split_batch(local_ranks.plan.global_num_microbatches, len(batches))[0]
        start, stop = split_batch(count, max(share, 1))[0]
        part, whole = slice_samples(inputs, start, stop), make_global_batch(batches[0], count, 1)
        undivided = partial(whole.undivided, 0)
        with self.restore_after_build(), local_ranks.explain_build(part, stop - start, undivided):
            compiled = local_ranks.build(part, stop - start, undivided)
        self.committed_microbatches = committed_microbatches(compiled.step_variants[-1].program, fabric.rank)

    @cached_property
    def checkpoints(self) -> LoopCheckpoints:
        """What saves and loads; it is imported when it is used, because that takes a tenth of the start of a rank."""
        from counterpoint.training.checkpointing.loop_checkpoints import LoopCheckpoints

        checkpoints = LoopCheckpoints(self.local_ranks)
        self.open_contexts.callback(checkpoints.close)
        return checkpoints

    @contextmanager
    def restore_after_build(self) -> Iterator[None]:
        """Let ranks that are built inside read what was loaded before."""
        if "checkpoints" not in vars(self):
            yield
            return
        self.checkpoints.before_build()
        yield
        self.checkpoints.restore_pending()

    def resolve_plan(
        self, read_sample_inputs: Callable[[], Any], count: int, batch: tuple[Any, Any] = ((), ())
    ) -> None:
        """Choose the plan, if it is ``auto``, and the number of microbatches for this batch size.

        Args:
            read_sample_inputs: returns the inputs of some samples.
            count: the number of samples of the batch.
            batch: inputs and targets.

        Raises:
            PlanError: there is no plan for it.
        """
        local_ranks = self.local_ranks
        if self.auto_strategy is not None:
            from counterpoint.training.ranks.plan_trials import TrialTarget, select_plan

            make_world = partial(sibling_world, local_ranks.world, local_ranks.options.timeout_s)
            make_batch = partial(make_global_batch, batch, count)
            target = TrialTarget(
                local_ranks.model,
                local_ranks.loss,
                local_ranks.optimizer_spec,
                local_ranks.options,
                make_world,
                make_batch,
            )
            local_ranks.use_plan(*select_plan(self.auto_strategy, target, read_sample_inputs(), count))
        elif not self.has_fixed_microbatches:
            min_samples = min_microbatch_size(local_ranks.model)
            local_ranks.use_plan(local_ranks.plan.with_microbatches_for(count, min_samples=min_samples))

    @property
    def compiled(self) -> CompiledPlan | None:
        """The plan with its program and model, as ``Trainer.compiled``; None before the first step."""
        return self.local_ranks.compiled

    @property
    def optimizer(self) -> optim.Optimizer:
        """The optimizer whose options are used; change them, or put a scheduler on it."""
        return self.local_ranks.optimizer_spec.optimizer

    def export_weights(self) -> nn.Module:
        """Load the trained weights into the model, on every rank, and return it; batches in flight are finished first.

        Their losses are not returned, as in ``import_weights()`` and ``close()``; ``flush()`` returns them.
        """
        self.finish()
        self.flush()
        self.local_ranks.export_weights()
        return self.local_ranks.model

    def full_optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's ``state_dict()`` in full, as torch's own optimizer has it; a collective call.

        A plain torch optimizer on the same parameters loads it. If all ranks are in this process,
        ``step.optimizer.state_dict()`` returns the same.

        Example:
            >>> import torch
            >>> model, loss = nn.Linear(2, 1), nn.functional.mse_loss
            >>> with parallelize(model, optim.Adam(model.parameters()), loss, strategy="zero3(2)") as step:
            ...     loss = step(torch.ones(4, 2), torch.zeros(4, 1))
            ...     saved = step.full_optimizer_state()
            >>> optim.Adam(model.parameters()).load_state_dict(saved)
        """
        self.finish()
        self.flush()
        return self.local_ranks.full_optimizer_state()

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients that the last step has applied, after clipping, by parameter; a collective call.

        If all ranks are in this process, parameters of the model have them as ``grad`` until the next step.

        Raises:
            DataError: the plan has no gradient of one step, or there is none since the weights were exported.
        """
        return self.local_ranks.step_gradients.read()

    def grad_norms(self) -> dict[str, float]:
        """Return the norms of :meth:`gradients` by parameter, without gathering these; a collective call."""
        return self.local_ranks.step_gradients.read_norms()

    @property
    def grad_norm(self) -> float:
        """The norm of all gradients of the last step, before clipping.

        Raises:
            DataError: ranks in other processes would have to take part, or there is no gradient.
        """
        local_ranks = self.local_ranks
        if not math.isnan(local_ranks.step_gradients.norm):
            return local_ranks.step_gradients.norm
        if not local_ranks.is_single_process:
            raise DataError(
                f"grad_norm was read, but under {local_ranks.plan} ranks in other processes have a part of the "
                "gradients; pass clip_norm=math.inf, so that every step computes it and clips nothing, or call "
                "step.grad_norms() on all ranks"
            )
        return math.hypot(*local_ranks.step_gradients.read_norms().values())

    @checked_call
    @contextmanager
    def full_weights(self, *, writeback: bool = False) -> Iterator[nn.Module]:
        """Load the trained weights into the model for what runs inside, on every rank; a collective call.

        Outside, the model may be out of date: reading its weights then loads them if all ranks are in this process, and
        is refused if they are not.

        Args:
            writeback: whether changes of the weights, which every rank makes equally, are loaded into the ranks
                afterwards.

        Yields:
            The model.

        Raises:
            DataError: with ``writeback``, ranks in other processes have other values afterwards.

        Example:
            >>> import torch
            >>> model, loss = nn.Linear(2, 1), nn.functional.mse_loss
            >>> with parallelize(model, optim.SGD(model.parameters(), lr=0.1), loss, strategy="zero3(2)") as step:
            ...     loss = step(torch.ones(4, 2), torch.zeros(4, 1))
            ...     with step.full_weights() as model:
            ...         saved = {name: value.clone() for name, value in model.state_dict().items()}
        """
        yield self.export_weights()
        if writeback:
            self.import_weights()

    def import_weights(self) -> None:
        """Load the model's weights, changed since :meth:`export_weights`, into all ranks.

        Every rank changes its own model equally before. Without this call a step raises if weights were changed of
        which ranks train copies. Changes through ``.data`` are not detected: torch does not count them.

        Raises:
            DataError: ranks in other processes have other values.
        """
        if self.local_ranks.compiled is not None:
            self.flush()
            self.local_ranks.require_same_weights()
            self.local_ranks.import_weights()

    @checked_call
    def save(
        self,
        folder: str | Path,
        *,
        scheduler: optim.lr_scheduler.LRScheduler | None = None,
        keep_last: int | None = None,
    ) -> Path:
        """Write a checkpoint from which any plan on any number of ranks continues; a collective call.

        It has the weights, the buffers, the optimizer's state and options, the number of steps, the state of the
        scheduler, and the states of the global random number generators of torch, Python and NumPy. Each rank writes
        what it has. Batches in flight are finished first, as in :meth:`export_weights`.

        Args:
            folder: of all checkpoints; the first call holds it for this run until the step is closed.
            scheduler: the learning rate scheduler.
            keep_last: how many checkpoints of this run are kept; None keeps all.

        Returns:
            The checkpoint's own folder.

        Raises:
            CheckpointError: there was no step yet, or the folder cannot be used or did not take the checkpoint.

        Example:
            >>> import tempfile, torch
            >>> model, loss = nn.Linear(2, 1), nn.functional.mse_loss
            >>> with parallelize(model, optim.Adam(model.parameters()), loss, strategy="zero3(2)") as step:
            ...     losses = [step(torch.ones(4, 2), torch.zeros(4, 1)) for _ in range(2)]
            ...     folder = tempfile.mkdtemp()
            ...     print(step.save(folder).name)
            step-00000002
            >>> with parallelize(model, optim.Adam(model.parameters()), loss, strategy="data(4)") as step:
            ...     print(step.load(folder))
            2
        """
        if self.local_ranks.observer is not None:
            return Path(folder)
        self.require_open("save()")
        self.finish()
        self.flush()
        self.local_ranks.finish_steps()
        return self.checkpoints.save(Path(folder), self.number, scheduler, keep_last)

    @checked_call
    def load(
        self,
        folder: str | Path,
        *,
        scheduler: optim.lr_scheduler.LRScheduler | None = None,
        if_missing: Literal["error", "start"] = "error",
    ) -> int:
        """Continue from a checkpoint of :meth:`save`, or of a ``Trainer``; a collective call.

        The model has the saved weights afterwards. Before the first step the ranks read the rest when they are built.
        What :meth:`save` lists is restored; a position in the data is not: skip as many batches.

        Args:
            folder: the checkpoint, or a folder of some, of which the newest intact one is taken.
            scheduler: the learning rate scheduler.
            if_missing: ``start`` to do nothing if there is no checkpoint.

        Returns:
            The number of steps that are done, as :attr:`number` is from now on; 0 if there is no checkpoint.

        Raises:
            CheckpointError: there is none, or it is of another model or optimizer.
        """
        if self.local_ranks.observer is not None:
            return self.number
        self.require_open("load()")
        self.finish()
        self.flush()
        done = self.checkpoints.load(Path(folder), scheduler, if_missing)
        self.number = done if done or self.checkpoints.run_id else self.number
        return done

    def require_open(self, call: str) -> None:
        """Raise unless the step is open, without accumulated batches.

        Raises:
            PlanError: it is closed.
            DataError: batches wait for ``update()``.
        """
        if self.is_closed:
            raise PlanError(f"{call} was called after close(); call it before the step is closed")
        if self.accumulated:
            raise DataError(f"{call} was called with {len(self.accumulated)} accumulated batches; call update() before")

    def close(self) -> None:
        """Export the weights and close the connection to the other ranks; a second call does nothing."""
        if self.is_closed:
            return
        if self.accumulated:
            warn(
                f"close() was called without update(), so that {len(self.accumulated)} accumulated "
                f"{'batch was' if len(self.accumulated) == 1 else 'batches were'} not trained on",
                stacklevel=2,
            )
        if self.local_ranks.observer is not None:
            self.local_ranks.observer.after_training()
        try:
            self.finish()
            self.flush()
            self.local_ranks.export_at_end()
        finally:
            self.is_closed = True
            self.open_contexts.close()
            self.local_ranks.close()
            if self.reporter is not None:
                self.reporter.end(None)

    if not TYPE_CHECKING:  # or every name would be an attribute for a type checker

        def __getattr__(self, name: str) -> NoReturn:
            """Report an attribute that does not exist, with the present name of one that was renamed."""
            hint = renamed_hint(name, RENAMED_METHODS)
            if name == "module":
                hint = "; the model is the one that was passed, and step.export_weights() gives it its trained weights"
            if name in PARTS_OF_STEP:
                hint = (
                    "; a call of the step runs forward, backward and update, which ranks do in one program: write what "
                    "is added to the loss, or scales it, into the loss function, and accumulate gradients over batches "
                    "with step.accumulate(batch) and step.update()"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def __enter__(self) -> TrainStep:
        """Use the step in a ``with`` block, which closes it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.close()
            return
        try:
            if not self.is_closed and not isinstance(self.local_ranks.world, DistributedWorld):
                abort_training(self.local_ranks, error, "the first step")
        finally:
            self.is_closed = True
            self.open_contexts.close()
            self.local_ranks.drop_stale_weights(error)
            self.local_ranks.close()
            if self.reporter is not None:
                self.reporter.end(error)


def make_reporter(local_ranks: LocalRanks, run_dir: str | Path) -> LoopReporter:
    """Return what tells a run's folder of each step; it is imported only for a loop that has one."""
    from counterpoint.training.callbacks.loop_reporter import LoopReporter
    from counterpoint.training.callbacks.run_folder import RunFolder

    return LoopReporter(local_ranks, RunFolder(run_dir))


@checked_call
def parallelize(  # noqa: PLR0913 - the options of a run, most by keyword
    model: nn.Module,
    optimizer: OptimizerArgument,
    loss: LossFunction,
    *,
    strategy: StrategyArgument = "data",
    num_microbatches: int | None = None,
    passes: Sequence[str] | None = None,
    batches: Literal["global", "per_rank"] = "global",
    uneven: bool | None = None,
    run_dir: str | Path | None = None,
    environment: RankEnvironment | None = None,
    **options: Any,  # noqa: ANN401 - checked by Options
) -> TrainStep:
    """Return a step that trains the model under any strategy, for a user's own training loop.

    Args:
        model: any module.
        optimizer: a torch optimizer on its parameters, a list of some that each have a part of them, or a factory.
        loss: from the model's output and the targets to the mean loss.
        strategy: a plan or its text, as for :class:`counterpoint.training.trainer.Trainer`.
        num_microbatches: microbatches of the innermost program.
        passes: passes over the program, as for the trainer.
        batches: ``global`` if every process passes the whole global batch, ``per_rank`` if each passes samples of its
            own, as a ``DistributedSampler`` gives them; the gradient is then that of all samples together, equally
            weighted. A process with all ranks passes the whole batch in either case.
        uneven: whether processes with batches of their own may have different numbers of samples, or of batches
            (:meth:`TrainStep.finish`): True, or False for an error; by default a warning.
        run_dir: folder for plan, metrics, TensorBoard events, trace and report, as ``Trainer.fit`` writes them.
        environment: what a launcher set for this process; detected by default.
        **options: fields of :class:`counterpoint.training.options.TrainingOptions`.

    Example:
        >>> import torch, counterpoint as cp
        >>> model = torch.nn.Linear(2, 1)
        >>> step = cp.parallelize(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss, strategy="zero3(2)"
        ... )
        >>> with step:
        ...     losses = [step(torch.ones(4, 2), torch.zeros(4, 1)) for _ in range(3)]
        >>> losses[0] > losses[2]
        True
    """
    if batches not in {"global", "per_rank"} or (batches == "global" and uneven is not None):
        given = f"batches={batches!r}" + (f" with uneven={uneven}" if uneven is not None else "")
        raise PlanError(
            f"{given} is not possible; batches is 'global' or 'per_rank', and uneven is about the batches of "
            f"batches='per_rank'{renamed_hint(f'batches={batches}', RENAMED_VALUES)}"
        )
    require_loss_function(loss)
    training_options = parse_options(options, parallelize)
    rank_environment = environment if environment is not None else detect()
    requested_plan = RequestedPlan(strategy, num_microbatches, passes)
    recorder = record_call(requested_plan)
    if recorder is not None:
        training_options, rank_environment = replace(training_options, num_measured_plans=0), None
        requested_plan = ONE_RANK
    plan = resolve_initial_plan(requested_plan, rank_environment)
    initial_values = begin_model(model, loss, training_options, rank_environment)
    optimizer_spec = wrap_optimizer(optimizer, model, loss, strategy)
    accelerator = place_model(training_options.device, model, loss, optimizer_spec.user_optimizers, rank_environment)
    world = open_world(rank_environment, plan.num_ranks, training_options.timeout_s)
    local_ranks = LocalRanks(world, plan, model, loss, optimizer_spec, training_options, accelerator, initial_values)
    if recorder is not None:
        local_ranks.observe_steps(recorder)
    batch_exchange = None
    if batches == "per_rank" and has_remote_ranks(world):
        require_synchronous_steps(plan, training_options.num_measured_plans)
        batch_exchange = PerRankBatchExchange(world.fabrics[0], optimizer_spec, uneven=uneven)
    return TrainStep(
        local_ranks,
        has_fixed_microbatches=requested_plan.has_explicit_microbatches,
        auto_strategy=make_auto_strategy(requested_plan, plan, training_options),
        batch_exchange=batch_exchange,
        plan_facts=[*requested_plan.describe(plan, training_options.profile), *describe_sources(initial_values)],
        run_dir=run_dir if recorder is None else None,
    )
