"""Data parallelism: every replica runs the same program on its own microbatches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal

from counterpoint.errors import PlanError, ProgramError
from counterpoint.model.spec import ModelSpec
from counterpoint.program.compression import exchanges_momentum, find_codec, ring_volume_factor
from counterpoint.program.instruction import ApplyPushes, Collective, Group, grad
from counterpoint.program.program import Program, RankProgram
from counterpoint.program.rewrite import insert_before_commit, order_by_grad_completion
from counterpoint.strategies.buckets import DEFAULT_BUCKETS, BucketConfig
from counterpoint.strategies.delayed_allreduce import DelayedAllReduce
from counterpoint.strategies.local_sgd import LocalSGD
from counterpoint.strategies.options import changed_options, format_term, require_choice
from counterpoint.strategies.replica_groups import map_replicas, updated_units
from counterpoint.strategies.strategy import CostEstimate, RankCost, Strategy
from counterpoint.strategies.sync_schedule import StepKind, SyncSchedule
from counterpoint.strategies.zero import Zero


@dataclass(frozen=True, slots=True)
class Data(Strategy):
    """Replicate the program ``degree`` times and all-reduce the gradients before every update.

    With ``update="sharded"`` each replica reduces and updates only its shard of the weights, which are gathered
    afterwards (weight-update sharding). Replicas on one host then share one copy of the weights in memory, and nothing
    is sent.

    Gradients are all-reduced once per step, after the last microbatch: ``num_microbatches=k`` corresponds to DDP's
    ``no_sync`` around all but one of k backwards, and to Horovod's ``backward_passes_per_step=k``.

    With ``sync_every=k`` (local SGD) gradients are not all-reduced. Each replica updates with the gradient of the mean
    loss over its own samples, clipped by its own norm, and the weights are averaged after every k-th step, with equal
    weight for each replica. Optimizer state (momentum) is never averaged. With ``sync_first=m`` the first m steps
    all-reduce gradients (post-local SGD), and the k-th step is counted from there.

    With ``staleness=1`` (double buffering) the gradients of a step are all-reduced while the next step computes, and
    applied after it: ``w[t+1] = w[t] - lr * g(w[t-1])``. The first step of a fit applies nothing; the gradient of its
    last step is applied only if a resumed run continues from its checkpoint. Clipping uses the norm of the gradient
    that is applied.

    With ``compress_from=m`` the first m steps all-reduce uncompressed gradients. ``compress=onebit`` is the exchange of
    1-bit Adam, after the ``freeze_step=m`` of :class:`counterpoint.optim.one_bit_adam.OneBitAdam`: each replica adds
    its gradient to the momentum, sends the signs of the result and the root mean square of each 1024 elements, and gets
    the same of the sum.

    Args:
        degree: number of ranks along the new axis.
        update: ``replicated``: every replica updates all parameters; ``sharded``: each updates its shard.
        compress: codec of the gradients: fp16, bf16, int8, int4, twobit:0.5, sign, topk:0.01 or powersgd:1; or onebit.
        compress_from: number of steps at the beginning without compression.
        reduce: ``sum``; or ``adasum``, which averages parallel components of the replicas' gradients and adds
            orthogonal ones.
        sync_every: average weights every this many steps instead of all-reducing gradients; 1 all-reduces gradients.
        sync_first: number of steps at the beginning that all-reduce gradients.
        staleness: 0 applies gradients in their own step, 1 in the next one.
        buckets: bucket sizes for all-reduces that overlap with the backward; without effect where nothing overlaps (a
            codec, staleness, or a sharded update in shared memory).

    Promise:
        The same results as single-process training, up to rounding, unless an option from ``compress`` on is given.
        With ``compress`` the applied gradient is the sum of the decoded gradients, bit-identical on all replicas. Each
        replica adds its compression error to its next gradient (error feedback), so that everything is sent
        eventually; a sum in fp16 or bf16 is itself rounded. A skipped step leaves the error feedback unchanged.
        With ``compress=onebit`` both what a replica sends and the sum are compressed with error feedback, and all
        replicas have the same momentum.
        With ``reduce=adasum`` the gradient of each parameter is the adaptive sum of the replicas' mean gradients;
        replicas without samples do not take part. Replicas are combined in pairs, recursively; an odd one waits for
        the next round, so any number of replicas works. Sparse gradients are summed uncompressed with both options.

        With sync_every=k replicas differ for at most k-1 steps and are equal after the k-th; in every step they agree
        on whether it is applied. Evaluation, and the model after a fit, use the mean of all replicas, which are not
        changed by it; a checkpoint has the weights and the optimizer state of every replica. With staleness=1 a
        gradient is at most one update old.

    Cost:
        Bytes sent per rank and step: ``2 (n-1)/n`` times the gradient bytes that it updates. With ``compress``: the
        encoded bytes ``2 (n-1)/n`` times for fp16, bf16, powersgd and onebit, ``n-1`` times for all other codecs. With
        ``reduce=adasum``: the gradient bytes ``n-1`` times. With sync_every=k on average ``2 (n-1)/n`` of ``1/k`` of
        the gradient bytes, all in every k-th step. Sparse gradients are counted as dense ones, though only rows are
        sent.
        Memory per rank: unchanged; with a sharded update ``1/n`` of the optimizer state, and on one host ``1/n`` of
        the weights. With ``compress`` two error-feedback buffers (current, and pending until the step is committed)
        and the encoded gradients, those of all replicas where they are sent ``n-1`` times; with ``onebit`` also
        ``1/n`` of two more buffers. With staleness=1 one more gradient.

    Source:
        Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020, section 3.
        Xu et al., Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training, 2020.
        Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019.
        Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; MXNet's gradient compression, 2018 (twobit).
        Lin et al., Deep Gradient Compression, ICLR 2018 (topk, without its momentum correction).
        Vogels et al., PowerSGD, NeurIPS 2019.
        Tang et al., 1-bit Adam, ICML 2021, algorithm 1 (onebit; DeepSpeed has one root mean square for all elements).
        Maleki et al., Scaling Distributed Training with Adaptive Summation, MLSys 2021 (adasum).
        Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019, algorithm 1.
        Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020 (post-local SGD).
        ChainerMN, create_multi_node_optimizer(..., double_buffering=True).
    """

    degree: int
    update: Literal["replicated", "sharded"] = "replicated"
    compress: str = ""
    reduce: Literal["sum", "adasum"] = "sum"
    sync_every: int = 1
    sync_first: int = 0
    staleness: int = 0
    buckets: BucketConfig = DEFAULT_BUCKETS
    compress_from: int = 0

    axis: ClassVar[str] = "data"

    def __post_init__(self) -> None:
        require_choice("data", "update", self.update, ("replicated", "sharded"))
        require_choice("data", "reduce", self.reduce, ("sum", "adasum"))
        require_choice("data", "staleness", self.staleness, (0, 1))
        self._check_codec()
        self._check_sync_options()
        if (self.update == "sharded") + (self.sync_every > 1) + (self.staleness > 0) > 1:
            raise PlanError(
                f"{self} combines options that exclude each other; give one of update=sharded, sync_every=... and "
                "staleness=1"
            )

    def _check_codec(self) -> None:
        if self.compress == "adasum" or (self.compress and self.reduce != "sum"):
            raise PlanError(
                f"data was given compress={self.compress} and reduce={self.reduce}, but adasum needs uncompressed "
                "gradients; give reduce=adasum without compress"
            )
        if self.codec and self.update == "sharded":
            raise PlanError(
                f"data was given update=sharded with {self.codec}, but a codec needs whole gradients, and replicas on "
                "one host share their update without sending any; give one of the two"
            )
        try:
            _ = self.codec and find_codec(self.codec)
        except ProgramError as error:
            raise PlanError(str(error)) from None
        if self.compress_from < 0 or (self.compress_from and not self.compress):
            raise PlanError(
                f"compress_from={self.compress_from} of data is the number of steps before compress=... begins; give "
                "1 or more together with compress=powersgd:2, for example"
            )
        if self.codec and exchanges_momentum(self.codec) and not self.compress_from:
            raise PlanError(
                "compress=onebit is for the momentum of 1-bit Adam after its warm-up; also give compress_from=..., the "
                "freeze_step of OneBitAdam"
            )
        if self.codec and (self.sync_every > 1 or self.staleness):
            raise PlanError(
                f"{self} combines {self.codec} with sync_every or staleness, but a codec is for gradients that are "
                "all-reduced in their own step; give one of the two"
            )

    def _check_sync_options(self) -> None:
        if self.sync_every < 1 or self.sync_first < 0:
            raise PlanError(
                f"sync_every={self.sync_every}, sync_first={self.sync_first} of data are not numbers of steps; give "
                "sync_every=1 or more, and sync_first=0 or more"
            )
        if self.sync_first and self.sync_every == 1:
            raise PlanError(
                f"sync_first={self.sync_first} is the number of steps before sync_every=... begins; also give "
                "sync_every=8, for example"
            )

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        changed = changed_options(
            self, "update", "compress", "reduce", "sync_every", "sync_first", "staleness", "compress_from"
        )
        return format_term("data", self.degree, [*changed, *self.buckets.options()])

    @property
    def codec(self) -> str:
        """Codec of the all-reduces; empty if gradients are sent uncompressed."""
        return self.reduce if self.reduce != "sum" else self.compress

    @property
    def sync_schedule(self) -> SyncSchedule:
        """Which kind of step is taken when."""
        if self.degree == 1:
            return SyncSchedule()
        return SyncSchedule(self.sync_every, self.sync_first, self.staleness, self.compress_from)

    def variant(self, kind: StepKind) -> Strategy:
        """Return the strategy that builds the program of one kind of step."""
        if kind in {"local", "sync"}:
            return LocalSGD(self.degree, kind == "sync", str(self))
        if kind == "compressed":
            return self
        if self.compress_from:
            return replace(self, compress="", compress_from=0)
        return replace(self, sync_every=1, sync_first=0)

    @property
    def _delegate(self) -> Strategy | None:
        """The strategy that implements the options, unless gradients are just all-reduced and applied."""
        if self.update == "sharded":
            return Zero(self.degree, level=1, name=str(self))
        if self.sync_every > 1:
            return LocalSGD(self.degree, averages=True, name=str(self))
        return DelayedAllReduce(self.degree, str(self)) if self.staleness else None

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program for ``degree`` replicas.

        Raises:
            PlanError: the replicas push to an asynchronous server, whose updates cannot be all-reduced; or there is a
                codec, and gradients are sharded.
        """
        for _, instruction in program.instructions():
            if isinstance(instruction, ApplyPushes):
                raise PlanError(
                    f"{self} comes after an asynchronous server, whose updates cannot be summed over replicas; write "
                    f"{self} before server(...), so that each group of replicas is one worker"
                )
            if self.codec and isinstance(instruction, Collective) and instruction.op == "reduce_scatter":
                raise PlanError(
                    f"{self} comes after a strategy that shards gradients, but {self.codec} needs whole gradients; "
                    + ("drop the codec" if self.compress_from else f"write {self} first, or drop the codec")
                )
        if self.degree == 1:
            return program
        delegate = self._delegate
        if delegate is not None:
            return delegate.lower(program, model)

        def add_all_reduces(rank_program: RankProgram, group: Group) -> RankProgram:
            units = order_by_grad_completion(rank_program, updated_units(rank_program.body))
            all_reduces = [Collective("all_reduce", grad(unit), group, codec=self.codec) for unit in units]
            return insert_before_commit(rank_program, all_reduces)

        return map_replicas(program, self.degree, add_all_reduces)

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the cost with one all-reduce of what each rank updates, or the equivalent."""
        delegate = self._delegate
        if delegate is not None and self.degree > 1:
            return delegate.estimate_cost(inner, model)
        factor = ring_volume_factor(self.codec, self.degree)
        ranks = tuple(
            replace(rank, allreduce_bytes=rank.allreduce_bytes + factor * self._reduced_bytes(rank, model))
            for rank in inner.ranks
        )
        return replace(inner, ranks=ranks).replicate(self.degree)

    def _reduced_bytes(self, rank: RankCost, model: ModelSpec) -> Fraction | int:
        if self.codec:
            return sum(model.unit_bytes(unit, self.codec) for unit in rank.updates)
        return sum(size * model.reduced_fraction(unit) for unit, size in rank.updates.items())
