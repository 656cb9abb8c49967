"""Data parallelism: every replica runs the same program on its own microbatches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal

from counterpoint.errors import PlanError, ProgramError
from counterpoint.model.spec import ModelSpec
from counterpoint.program.compression import find_codec, ring_volume_factor
from counterpoint.program.instruction import ApplyPushes, Collective, Instruction, Update, grad
from counterpoint.program.program import Program, RankProgram
from counterpoint.program.rewrite import insert_before_commit, order_by_grad_completion, replicate, widen_commits
from counterpoint.strategies.buckets import DEFAULT_BUCKETS, BucketConfig
from counterpoint.strategies.delayed_allreduce import DelayedAllReduce
from counterpoint.strategies.local_sgd import LocalSGD
from counterpoint.strategies.strategy import CostEstimate, Granularity, RankCost, Strategy
from counterpoint.strategies.sync_schedule import StepKind, SyncSchedule
from counterpoint.strategies.zero import Zero


@dataclass(frozen=True, slots=True)
class Data:
    """Copy the program ``degree`` times and sum the gradients of the copies before every update.

    With ``update="sharded"`` each copy sums and updates only its share of the weights, which are then joined. Where the
    copies are on one host, they have weights in common that way, and nothing is sent at all.

    Gradients are summed once per step, after the last of its microbatches: with ``num_microbatches=k`` that is what
    DDP does with ``no_sync`` around all but one of k backwards, and Horovod with ``backward_passes_per_step=k``.

    With ``sync_every=k`` (local SGD) nothing is summed. Each copy updates its weights with the gradient of the mean
    loss over its own samples, clipped by its own norm, and after every k-th step the weights are averaged, each copy
    counted alike. Optimizer state (momentum) is never averaged: every copy keeps its own. With ``sync_first=m`` the
    first m steps sum gradients instead (post-local SGD), and the k-th step is counted from there.

    With ``staleness=1`` (double buffering) the gradients of a step are summed while the next one computes, and applied
    after it: ``w[t+1] = w[t] - lr * g(w[t-1])``. The first step of a fit applies nothing, and what its last step has
    computed is applied by no step, unless a resumed run goes on from its checkpoint. The norm is that of what is
    applied.

    Args:
        degree: ranks along the new axis.
        update: ``replicated``: every replica updates all parameters; ``sharded``: each updates its shard.
        compress: the code that gradients travel in: fp16, bf16, int8, twobit:0.5, sign, topk:0.01 or powersgd:1.
        reduce: ``sum``, or ``adasum`` to average what is parallel in the copies' gradients and add what is orthogonal.
        sync_every: average weights after so many steps instead of summing gradients in each; 1 sums gradients.
        sync_first: sum gradients in so many steps at the beginning.
        staleness: 0 for gradients that are applied in their own step, 1 for the step after it.
        buckets: in which pieces gradients are summed while the backward of their step goes on; where nothing is
            summed then (a code, staleness, an update in memory that copies have in common), they say nothing.

    Promise:
        The same numbers as on one rank, to rounding; but not with any option from ``compress`` on. With ``compress``
        the applied gradient is the sum of what the copies' gradients have become in the code, the same bits on every
        copy. Each copy keeps what it has not sent and adds it to its next gradient, so that everything is sent in the
        end (but a sum in fp16 or bf16 is itself rounded to its dtype); a step that is left out changes nothing of it.
        With ``reduce=adasum`` each parameter's gradient is the adaptive sum of the mean gradients that the copies have
        of their own samples; copies without samples take no part. They are paired in their order, then the results, as
        often as needed; one that is left over waits for the next round, so that any number will do. Sparse
        gradients are summed as they are, whatever these two options say.

        With sync_every=k copies differ for at most k-1 steps and are equal after the k-th; they agree in every step
        whether it counts. An evaluation, and the model after a fit, have the mean of all copies, and neither changes
        the copies; a checkpoint has every copy's own weights and state. With staleness=1 no gradient is more than one
        update old.

    Cost:
        Bytes sent per rank and step: ``2 (n-1)/n`` times the gradient bytes it updates. With ``compress``: the encoded
        bytes ``2 (n-1)/n`` times for fp16, bf16 and powersgd, ``n-1`` times for all others. With ``reduce=adasum``:
        the gradient bytes ``n-1`` times. With sync_every=k on average ``2 (n-1)/n`` of ``1/k`` of the gradient bytes,
        all in every k-th step. Sparse gradients, of which only rows travel, are counted as dense ones.
        Memory per rank: as without it; with a shared update optimizer state ``1/n``, on one host weights ``1/n``, too;
        with ``compress`` what has not been sent twice, as it is and as it will be if the step is applied. The encoded
        gradients, of all copies where they are sent ``n-1`` times. With staleness=1 one gradient more.

    Source:
        Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020, section 3.
        Xu et al., Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training, 2020.
        Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019.
        Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; MXNet's gradient compression, 2018 (twobit).
        Lin et al., Deep Gradient Compression, ICLR 2018 (topk, without its momentum correction).
        Vogels et al., PowerSGD, NeurIPS 2019.
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

    axis: ClassVar[str] = "data"
    splits_batch: ClassVar[bool] = True
    granularity: ClassVar[Granularity] = "whole"

    def __post_init__(self) -> None:
        if self.update not in {"replicated", "sharded"}:
            raise PlanError(f"data has no update={self.update!r}; give update=replicated or update=sharded")
        if self.reduce not in {"sum", "adasum"}:
            raise PlanError(f"data has no reduce={self.reduce!r}; give reduce=sum or reduce=adasum")
        self._check_codec()
        self._check_sync_options()
        if (self.update == "sharded") + (self.sync_every > 1) + (self.staleness > 0) > 1:
            raise PlanError(
                f"{self} combines options of which each says what is done with a gradient; give one of update=sharded, "
                "sync_every=... and staleness=1"
            )

    def _check_codec(self) -> None:
        if self.compress == "adasum" or (self.compress and self.reduce != "sum"):
            raise PlanError(
                f"data was given compress={self.compress} and reduce={self.reduce}, but adasum needs whole gradients; "
                "give reduce=adasum without compress"
            )
        if self.codec and self.update == "sharded":
            raise PlanError(
                f"data was given update=sharded with the code {self.codec}, but a code is about whole gradients, and "
                "replicas on one host share their update without sending any; give one or the other"
            )
        try:
            _ = self.codec and find_codec(self.codec)
        except ProgramError as wrong:
            raise PlanError(str(wrong)) from None
        if self.codec and (self.sync_every > 1 or self.staleness):
            raise PlanError(
                f"{self} has the code {self.codec}, but a code is for gradients that are summed in their own step, "
                "which neither sync_every nor staleness does; give one or the other"
            )

    def _check_sync_options(self) -> None:
        if self.sync_every < 1 or self.sync_first < 0:
            raise PlanError(
                f"sync_every={self.sync_every}, sync_first={self.sync_first} of data are no numbers of steps; give "
                "sync_every=1 or more, and sync_first=0 or more"
            )
        if self.staleness not in {0, 1}:
            raise PlanError(f"data has no staleness={self.staleness}; there are two gradients: give staleness=0 or 1")
        if self.sync_first and self.sync_every == 1:
            raise PlanError(
                f"sync_first={self.sync_first} says how many steps sum gradients before sync_every=... begins; give "
                "sync_every=8, for one, as well"
            )

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        options = [f"update={self.update}"] if self.update != "replicated" else []
        options += [f"compress={self.compress}"] if self.compress else []
        options += [f"reduce={self.reduce}"] if self.reduce != "sum" else []
        options += [f"sync_every={self.sync_every}"] if self.sync_every != 1 else []
        options += [f"sync_first={self.sync_first}"] if self.sync_first else []
        options += [f"staleness={self.staleness}"] if self.staleness else []
        options += self.buckets.options()
        return f"data({', '.join([str(self.degree), *options])})"

    @property
    def codec(self) -> str:
        """The code of its sums; ``""`` where gradients travel as they are."""
        return self.reduce if self.reduce != "sum" else self.compress

    @property
    def sync_schedule(self) -> SyncSchedule:
        """Which kind of step comes when."""
        return SyncSchedule(self.sync_every, self.sync_first, self.staleness) if self.degree > 1 else SyncSchedule()

    def variant(self, kind: StepKind) -> Strategy:
        """Return the strategy that makes the program of one kind of step."""
        if kind in {"local", "sync"}:
            return LocalSGD(self.degree, kind == "sync", str(self))
        return replace(self, sync_every=1, sync_first=0)

    @property
    def _delegate(self) -> Strategy | None:
        """What does it instead, where gradients are not just summed and applied by all."""
        if self.update == "sharded":
            return Zero(self.degree, level=1, name=str(self))
        if self.sync_every > 1:
            return LocalSGD(self.degree, averages=True, name=str(self))
        return DelayedAllReduce(self.degree, str(self)) if self.staleness else None

    def num_ranks(self, inner: int) -> int:
        """Return ``degree`` times as many ranks."""
        return inner * self.degree

    def split_model(self, model: ModelSpec) -> ModelSpec:
        """Return the model as it is."""
        return model

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program for ``degree`` replicas.

        Raises:
            PlanError: the replicas push to an asynchronous server, which nobody could sum, or there is a code, and
                gradients have been shared out.
        """
        for _, word in program.instructions():
            if isinstance(word, ApplyPushes):
                raise PlanError(
                    f"{self} stands after an asynchronous server, whose updates cannot be summed over replicas; write "
                    f"{self} before server(...), so that each group of replicas is one worker"
                )
            if self.codec and isinstance(word, Collective) and word.op == "reduce_scatter":
                raise PlanError(
                    f"{self} stands where gradients have been shared out, but the code {self.codec} is about whole "
                    f"ones; write {self} first, or leave its code out"
                )
        if self.degree == 1:
            return program
        special = self._delegate
        if special is not None:
            return special.lower(program, model)
        stride = program.num_ranks
        copies = widen_commits(replicate(program, self.degree), self.degree)

        def sums(rank: int, row: RankProgram) -> list[Instruction]:
            twins = tuple(range(rank % stride, stride * self.degree, stride))
            units = [word.unit for word in row.body if isinstance(word, Update)]
            return [
                Collective("all_reduce", grad(unit), twins, codec=self.codec)
                for unit in order_by_grad_completion(row, units)
            ]

        return insert_before_commit(copies, sums)

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the forecast with one all-reduce of what each rank updates, or what amounts to it."""
        special = self._delegate
        if special is not None and self.degree > 1:
            return special.estimate_cost(inner, model)
        trips = ring_volume_factor(self.codec, self.degree)
        ranks = tuple(
            replace(rank, allreduce_bytes=rank.allreduce_bytes + trips * self._reduced_bytes(rank, model))
            for rank in inner.ranks
        )
        return replace(inner, ranks=ranks).replicate(self.degree)

    def _reduced_bytes(self, rank: RankCost, model: ModelSpec) -> Fraction | int:
        """Return the bytes that one rank brings into sums."""
        if self.codec:
            return sum(model.unit_bytes(unit, self.codec) for unit in rank.updates)
        return sum(rank.updates.values())
