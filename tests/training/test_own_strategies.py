"""Strategies, schedules and programs of the user's own, given as objects and checked as the built-in ones are."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from counterpoint.program.instruction import Collective, Commit, TensorRef, Update
from counterpoint.program.program import Program, RankProgram
from counterpoint.program.rewrite import insert_before_commit, replicate, widen_commits
from counterpoint.strategies.pipeline.schedules.gpipe import GPIPE
from counterpoint.strategies.pipeline.schedules.schedule import PipelineAction, StageReplica
from counterpoint.strategies.replica_groups import map_replicas
from counterpoint.strategies.strategy import RankCost, Strategy, ring_fraction
from tests.training.trainers import mlp


@dataclass(frozen=True, slots=True)
class AllReduced(Strategy):
    """Data parallelism as a user would write it; `forgets` leaves out what makes it right."""

    degree: int
    forgets: str = ""
    axis: ClassVar[str] = "mine"

    def lower(self, program, model):
        if self.forgets == "program":
            return None
        if self.forgets == "ranks":
            return program
        if self.forgets == "samples":
            return replicate(program, self.degree, same_samples=True)
        if self.forgets == "all_reduce":
            return map_replicas(program, self.degree, lambda rank_program, group: rank_program)
        return map_replicas(program, self.degree, self.reduce)

    def reduce(self, rank_program, group):
        units = [instruction.unit for instruction in rank_program.body if isinstance(instruction, Update)]
        sums = [Collective("all_reduce", TensorRef("grad", unit), group) for unit in units]
        return insert_before_commit(rank_program, sums)

    def estimate_cost(self, inner, model):
        if self.forgets == "cost":
            return inner
        factor = ring_fraction(self.degree) * (1 if self.forgets == "bytes" else 2)
        return inner.add_sent_bytes(lambda rank: factor * rank.updated_bytes).replicate(self.degree)


@dataclass(frozen=True, slots=True)
class IdleRanks(Strategy):
    """As many idle ranks as there are others: they take part in commits, and compute nothing."""

    degree: int = 2
    axis: ClassVar[str] = "idle"
    splits_batch: ClassVar[bool] = False

    def lower(self, program, model):
        both = widen_commits(replicate(program, 2, same_samples=True), 2)
        busy, idle = both.rank_programs[: program.num_ranks], both.rank_programs[program.num_ranks :]
        commits = [RankProgram(tuple(one for one in rank.body if isinstance(one, Commit))) for rank in idle]
        return Program((*busy, *commits))

    def estimate_cost(self, inner, model):
        return replace(inner, ranks=(*inner.ranks, *(RankCost((), 0, {}, in_flight=0) for _ in inner.ranks)))


def reversed_gpipe(replica: StageReplica) -> Iterator[PipelineAction]:
    """All forwards from the last microbatch to the first, then all backwards in the same order."""
    yield from (PipelineAction("F", micro) for micro in reversed(replica.micros))
    yield from (PipelineAction("B", micro) for micro in reversed(replica.micros))


def batch():
    random = torch.Generator().manual_seed(3)
    return torch.randn(16, 6, generator=random, dtype=torch.float64), torch.randint(0, 3, (16,), generator=random)


def compare(*strategies):
    return cp.parity(mlp(), partial(torch.optim.AdamW, lr=1e-2), F.cross_entropy, [batch()] * 2, strategies=strategies)


def first_step(strategy, **options):
    with cp.parallelize(mlp(), partial(torch.optim.SGD, lr=0.1), F.cross_entropy, strategy=strategy, **options) as step:
        return step(*batch())


def test_an_own_strategy_trains_as_a_plain_loop_does_alone_and_with_others():
    assert compare(AllReduced(2), (cp.Pipeline(2), AllReduced(2)), (AllReduced(2), cp.Data(2))).all_equal


@pytest.mark.parametrize("strategies", [(IdleRanks(),), (IdleRanks(), cp.Data(2)), (cp.Pipeline(2), IdleRanks())])
def test_ranks_may_do_nothing(strategies):
    assert compare(strategies).all_equal


@pytest.mark.parametrize(
    ("forgets", "message"),
    [
        ("program", r"lower of AllReduced\(degree=2, forgets='program'\) returned a NoneType; it returns the Program"),
        ("ranks", r"returned a program of 1 ranks, but its num_ranks\(inner\) is 2"),
        (
            "samples",
            r"returned a program of 1 microbatches, but with splits_batch=True it has 2; define splits_batch: ",
        ),
        ("cost", r"estimate_cost of .* returned 1 ranks; it returns a CostEstimate of its 2 ranks"),
        ("bytes", r"verifier rule 8 violated: "),
        ("all_reduce", r"verifier rule 6 violated: "),
    ],
)
def test_an_own_strategy_is_verified_before_the_first_step(forgets, message):
    with pytest.raises(cp.ProgramError, match=message):
        first_step(AllReduced(2, forgets))


class Unfinished(Strategy):
    """Abstract for a type checker, but not in Python."""

    degree: int = 2


def make(strategy_class):
    return strategy_class()


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            AllReduced,
            r"AllReduced is a class, and a plan has strategies; give one with its number of ranks, AllReduced\(2\)",
        ),
        (
            len,
            "len is not a strategy; give the text of a plan such as 'data\\(2\\)', or a frozen dataclass that inherits",
        ),
        ([cp.Data(2), 3], "int is not a strategy"),
        (
            make(Unfinished),
            "the strategy Unfinished lacks 3 of its members:\naxis: the name of its axis of ranks, a text\nlower: lower.*\n"
            "estimate_cost: ",
        ),
    ],
)
def test_what_an_own_strategy_lacks_is_listed(strategy, message):
    with pytest.raises(cp.PlanError, match=message):
        first_step(strategy)


def test_an_own_schedule_trains_as_a_plain_loop_does():
    plans = cp.Pipeline(2, schedule=reversed_gpipe), (cp.Pipeline(2, schedule=GPIPE), cp.Data(2))
    parity = compare(*plans)
    assert parity.all_equal
    assert [plan.strategy for plan in parity.plans] == [
        "pipeline(2, schedule=reversed_gpipe)", "pipeline(2, schedule=gpipe) * data(2)"
    ]  # fmt: skip


def test_an_own_schedule_holds_as_many_microbatches_as_its_actions_say():
    plan = cp.Plan((cp.Pipeline(2, schedule=reversed_gpipe),), num_microbatches=4)
    compiled = cp.compile(plan, cp.linear_chain(2))
    assert [rank.in_flight for rank in compiled.cost.ranks] == [4, 4]
    assert cp.format_program(compiled.program).startswith("F0.3 x1.3>1 F0.2 x1.2>1 ")


def forgets_a_backward(replica):
    yield from (action for action in reversed_gpipe(replica) if (action.kind, action.micro) != ("B", 1))


def twice(replica):
    yield from [*reversed_gpipe(replica), PipelineAction("B", 0)]


def too_early(replica):
    yield from reversed(list(reversed_gpipe(replica)))


def elsewhere(replica):
    yield PipelineAction("F", 9)


def words(replica):
    yield "F0"


def deadlocked(replica):
    order = replica.micros if replica.stage == 0 else replica.micros[::-1]
    for micro in order:
        yield from (PipelineAction("F", micro), PipelineAction("B", micro))


@pytest.mark.parametrize(
    ("schedule", "error", "message"),
    [
        (
            forgets_a_backward,
            cp.ProgramError,
            "forgets_a_backward, for stage 0 of 2, yields no B of microbatch 1 on chunk 0",
        ),
        (twice, cp.ProgramError, "twice, for stage 0 of 2, yields B of microbatch 0 on chunk 0 twice"),
        (too_early, cp.ProgramError, "too_early, for stage 0 of 2, yields B of microbatch 0 on chunk 0 before its F"),
        (
            elsewhere,
            cp.ProgramError,
            "yields F of microbatch 9 on chunk 0, but its microbatches are 0 to 3, and it has 1",
        ),
        (words, cp.ProgramError, r"yields 'F0'; yield PipelineAction\(kind, micro, chunk\)"),
        (deadlocked, cp.ProgramError, "deadlock: 2 of 2 ranks wait for each other"),
        (
            7,
            cp.PlanError,
            "schedule=7 is not a pipeline schedule; give the name of one, or a function that is called with",
        ),
    ],
)
def test_a_wrong_schedule_is_refused_with_what_it_lacks(schedule, error, message):
    with pytest.raises(error, match=message):
        first_step(cp.Pipeline(2, schedule=schedule), num_microbatches=4)


@pytest.mark.long(quick=["pipeline(2)"])
@pytest.mark.parametrize(
    "strategy",
    ["data(2)", "zero3(2)", "pipeline(2)", "pipeline(2, schedule=gpipe) * data(2)", "tensor(2)", "bsp(2)", "solo"],
)
def test_the_program_of_a_plan_runs_from_its_text(strategy):
    with cp.parallelize(mlp(), partial(torch.optim.SGD, lr=0.1), F.cross_entropy, strategy=strategy) as step:
        before, loss, compiled = step.compiled, step(*batch()), step.compiled
        assert before is None
        assert compiled is not None
        text = cp.format_program(compiled.program)
    assert compare(cp.parse_program(text)).all_equal
    assert first_step(cp.parse_program(text)) == loss


TWO_STAGES = "F0.0 x1.0>1 g0.0<1 B0.0 commit@0,1 U0\nx1.0<0 F1.0 F2.0 B2.0 B1.0 g0.0>0 commit@0,1 U1 U2"


def test_a_program_may_be_written_by_hand():
    assert compare(cp.parse_program(TWO_STAGES)).all_equal
    assert cp.verify(cp.parse_program(TWO_STAGES)).peak_in_flight == [1, 1]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (TWO_STAGES.replace(" U2", ""), cp.ProgramError, "verifier rule 6 violated: "),
        (TWO_STAGES.replace(" g0.0>0", ""), cp.ProgramError, "verifier rule 1 violated: "),
        (
            "F0.0 F1.0 B1.0 B0.0 commit@0 U0 U1",
            cp.PlanError,
            "the program computes 2 blocks, but the model has 3; write it",
        ),
        ("U0", cp.PlanError, "the program has no forward, and only a step with a flush can be run"),
        ("F0.0 | B0.0 | U0", cp.PlanError, "the program is an asynchronous pipeline, and only a step with a flush"),
    ],
)
def test_a_wrong_program_is_refused_before_the_first_step(text, error, message):
    with pytest.raises(error, match=message):
        first_step(cp.parse_program(text))


def test_a_program_of_another_number_of_microbatches_is_refused():
    with pytest.raises(cp.PlanError, match="the program computes 1 microbatches, but the plan has 4"):
        first_step(cp.parse_program(TWO_STAGES), num_microbatches=4)


def test_a_trainer_takes_them_too():
    data = torch.utils.data.TensorDataset(*batch())
    trainer = cp.Trainer(
        mlp(), loss=nn.CrossEntropyLoss(), optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=(cp.Pipeline(2, schedule=reversed_gpipe), AllReduced(2)), progress="off",
    )  # fmt: skip
    with trainer:
        history = trainer.fit(data, batch_size=16)
    assert history.losses[0] == pytest.approx(first_step("solo"), rel=1e-12)
