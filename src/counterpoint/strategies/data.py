"""Data parallelism: every replica runs the same program on its own microbatches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal

from counterpoint.errors import PlanError, ProgramError
from counterpoint.model.spec import ModelSpec
from counterpoint.program.codes import find_code, sum_trips
from counterpoint.program.instruction import Collective, Instruction, Serve, Update, grad
from counterpoint.program.program import Program, Row
from counterpoint.program.rewrite import before_commit, last_backward_first, replicate, widen_commits
from counterpoint.strategies.strategy import Forecast, Need, RankForecast
from counterpoint.strategies.zero import Zero


@dataclass(frozen=True, slots=True)
class Data:
    """Copy the program ``degree`` times and sum the gradients of the copies before every update.

    With ``update="shared"`` each copy sums and updates only its share of the weights, which are then joined. Where the
    copies are on one host, they have weights in common that way, and nothing is sent at all.

    Args:
        degree: ranks along the new axis.
        update: ``own`` for every copy updates all, ``shared`` for each its share.
        compress: the code that gradients travel in: fp16, bf16, int8, twobit:0.5, sign, topk:0.01 or powersgd:1.
        reduce: ``sum``, or ``adasum`` to average what is parallel in the copies' gradients and add what is orthogonal.

    Promise:
        The same numbers as on one rank, to rounding; but not with the last two options. With ``compress`` the applied
        gradient is the sum of what the copies' gradients have become in the code, the same bits on every copy. Each
        copy keeps what it has not sent and adds it to its next gradient, so that everything is sent in the end (but a
        sum in fp16 or bf16 is itself rounded to its dtype); a step that is left out changes nothing of it. With
        ``reduce=adasum`` each parameter's gradient is the adaptive sum of the mean gradients that the copies have of
        their own samples; copies without samples take no part. They are paired in their order, then the results, as
        often as needed; one that is left over waits for the next round, so that any number will do. Sparse
        gradients are summed as they are, whatever these options say.

    Cost:
        Bytes sent per rank and step: ``2 (n-1)/n`` times the gradient bytes it updates. With ``compress``: the encoded
        bytes ``2 (n-1)/n`` times for fp16, bf16 and powersgd, ``n-1`` times for all others. With ``reduce=adasum``:
        the gradient bytes ``n-1`` times. Sparse gradients, of which only rows travel, are counted as dense ones.
        Memory per rank: as without it; with a shared update optimizer state ``1/n``, on one host weights ``1/n``, too;
        with ``compress`` what has not been sent twice, as it is and as it will be if the step is applied. The encoded
        gradients, of all copies where they are sent ``n-1`` times.

    Source:
        Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020, section 3.
        Xu et al., Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training, 2020.
        Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019.
        Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; MXNet's gradient compression, 2018 (twobit).
        Lin et al., Deep Gradient Compression, ICLR 2018 (topk, without its momentum correction).
        Vogels et al., PowerSGD, NeurIPS 2019.
        Maleki et al., Scaling Distributed Training with Adaptive Summation, MLSys 2021 (adasum).
    """

    degree: int
    update: Literal["own", "shared"] = "own"
    compress: str = ""
    reduce: Literal["sum", "adasum"] = "sum"

    axis: ClassVar[str] = "data"
    splits_batch: ClassVar[bool] = True
    need: ClassVar[Need] = "none"

    def __post_init__(self) -> None:
        if self.update not in {"own", "shared"}:
            raise PlanError(f"data has no update={self.update!r}; give update=own or update=shared")
        if self.reduce not in {"sum", "adasum"}:
            raise PlanError(f"data has no reduce={self.reduce!r}; give reduce=sum or reduce=adasum")
        if self.compress == "adasum" or (self.compress and self.reduce != "sum"):
            raise PlanError(
                f"data was given compress={self.compress} and reduce={self.reduce}, but adasum needs whole gradients; "
                "give reduce=adasum without compress"
            )
        if self.code and self.update == "shared":
            raise PlanError(
                f"data was given update=shared with the code {self.code}, but a code is about whole gradients, and "
                "replicas on one host share their update without sending any; give one or the other"
            )
        try:
            _ = self.code and find_code(self.code)
        except ProgramError as wrong:
            raise PlanError(str(wrong)) from None

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        options = [f"update={self.update}"] if self.update != "own" else []
        options += [f"compress={self.compress}"] if self.compress else []
        options += [f"reduce={self.reduce}"] if self.reduce != "sum" else []
        return f"data({', '.join([str(self.degree), *options])})"

    @property
    def code(self) -> str:
        """The code of its sums; ``""`` where gradients travel as they are."""
        return self.reduce if self.reduce != "sum" else self.compress

    @property
    def _sharing(self) -> Zero:
        return Zero(self.degree, level=1, name=str(self))

    def num_ranks(self, inner: int) -> int:
        """Return ``degree`` times as many ranks."""
        return inner * self.degree

    def refine(self, model: ModelSpec) -> ModelSpec:
        """Return the model as it is."""
        return model

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program for ``degree`` replicas.

        Raises:
            PlanError: the replicas push to an asynchronous server, which nobody could sum, or there is a code, and
                gradients have been shared out.
        """
        for _, word in program.words():
            if isinstance(word, Serve):
                raise PlanError(
                    f"{self} stands after an asynchronous server, whose updates cannot be summed over replicas; write "
                    f"{self} before server(...), so that each group of replicas is one worker"
                )
            if self.code and isinstance(word, Collective) and word.verb == "share":
                raise PlanError(
                    f"{self} stands where gradients have been shared out, but the code {self.code} is about whole "
                    f"ones; write {self} first, or leave its code out"
                )
        if self.degree == 1:
            return program
        if self.update == "shared":
            return self._sharing.lower(program, model)
        stride = program.num_ranks
        copies = widen_commits(replicate(program, self.degree), self.degree)

        def sums(rank: int, row: Row) -> list[Instruction]:
            twins = tuple(range(rank % stride, stride * self.degree, stride))
            units = [word.unit for word in row.body if isinstance(word, Update)]
            return [Collective("sum", grad(unit), twins, code=self.code) for unit in last_backward_first(row, units)]

        return before_commit(copies, sums)

    def forecast(self, before: Forecast, model: ModelSpec) -> Forecast:
        """Return the forecast with one all-reduce of what each rank updates, or what amounts to it."""
        if self.update == "shared":
            return self._sharing.forecast(before, model)
        trips = sum_trips(self.code, self.degree)
        ranks = tuple(replace(rank, summed=rank.summed + trips * self._summed(rank, model)) for rank in before.ranks)
        return replace(before, ranks=ranks).copied(self.degree)

    def _summed(self, rank: RankForecast, model: ModelSpec) -> Fraction | int:
        """Return the bytes that one rank brings into sums."""
        if self.code:
            return sum(model.unit_bytes(unit, self.code) for unit in rank.updates)
        return sum(rank.updates.values())
