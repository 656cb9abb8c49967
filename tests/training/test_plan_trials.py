"""``auto`` with ``measure``: the best few plans are tried for some steps, and the run has the numbers of any other."""

import pytest
import torch
import torch.nn.functional as F

import counterpoint as cp
from counterpoint.planner.choose import PlanTrial, candidates_to_measure, decide_by_trials, rank_and_choose
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.memory_suggestions import PlanningProblem
from counterpoint.training.batches.batch_source import open_batches
from counterpoint.training.batches.dataset_batches import DataLoadingConfig
from counterpoint.training.ranks.plan_trials import (
    NEAR_FASTEST_FACTORS,
    ROUNDS,
    TrialRunner,
    normalize_speed,
    run_interleaved,
)
from counterpoint.world.cluster import Cluster, Device
from tests.planner.models import layers
from tests.training.trainers import ADAMW, batch_norm_mlp, build_seeded, dataset, max_difference, mlp, params_of

ROUND_S = "counterpoint.training.ranks.plan_trials.ROUND_S"
QUESTION = PlanningProblem(layers(4, cost=1e9), Cluster(), 16)


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch):
    """What is measured need not be accurate here."""
    monkeypatch.setattr(ROUND_S, 0.02)


def chosen(num_ranks=2, question=QUESTION):
    return rank_and_choose(enumerate_plans(num_ranks, question.model), question)


def trained(strategy, build=mlp, **options):
    model, factory = build(), options.pop("optimizer", ADAMW)
    with cp.Trainer(
        model, loss=F.cross_entropy, optimizer=factory, strategy=strategy, batch_norm="deferred", progress="off",
        **options,
    ) as trainer:  # fmt: skip
        history = trainer.fit(dataset(48), batch_size=12)
    return trainer, params_of(model), history.losses


@pytest.mark.long
def test_a_run_whose_plan_was_measured_equals_solo():
    trainer, weights, losses = trained("auto(2)", num_measured_plans=2)
    _, expected, solo_losses = trained("solo")
    assert len(trainer.choice.trials) == 3, "two, and data parallelism"
    assert max_difference(weights, expected) < 1e-12
    assert losses == pytest.approx(solo_losses, rel=1e-12)


@pytest.mark.long
def test_measuring_draws_nothing_and_changes_no_statistics_of_the_model():
    torch.manual_seed(5)
    trainer, weights, losses = trained("auto(2)", batch_norm_mlp, num_measured_plans=1)
    after = torch.rand(3)
    torch.manual_seed(5)
    _, expected, plain = trained(trainer.plan, batch_norm_mlp)
    assert losses == plain
    assert max_difference(weights, expected) == 0
    assert torch.equal(after, torch.rand(3))


@pytest.mark.long
def test_what_is_taken_has_not_measured_slower_than_data_parallelism():
    trainer, _, _ = trained("auto(2)", num_measured_plans=2)
    times = {str(trial.plan): trial.step_s for trial in trainer.choice.trials}
    assert str(trainer.choice.plan) == "data(2)" or times[str(trainer.choice.plan)] < times["data(2)"]


def test_an_optimizer_that_was_made_for_the_model_stays_unchanged():
    model = mlp()
    optimizer = ADAMW(model.parameters())
    with cp.Trainer(
        model, loss=F.cross_entropy, optimizer=optimizer, strategy="auto(2)", num_measured_plans=1
    ) as trainer:
        batches = open_batches(
            dataset(48), layout=trainer.sample_layout, batch_size=12, collate_fn=None, loading=DataLoadingConfig()
        )
        trainer.resolve_plan(batches)
        assert not optimizer.state
        assert len(trainer.fit(dataset(48), batch_size=12).losses) == 4


@pytest.mark.long
def test_a_custom_loop_measures_on_its_first_batch_and_trains_on_it_as_ever():
    inputs, targets = dataset(24)[:]
    losses = {}
    for strategy, measure in (("auto(2)", 1), ("solo", 0)):
        model = mlp()
        with cp.parallelize(
            model, ADAMW(model.parameters()), F.cross_entropy, strategy=strategy, num_measured_plans=measure
        ) as step:
            losses[strategy] = [step(inputs, targets) for _ in range(3)]
            assert (step.local_ranks.choice is not None) == (measure > 0)
    assert losses["auto(2)"] == pytest.approx(losses["solo"], rel=1e-12)


def test_a_plan_that_the_model_does_not_support_is_skipped_with_the_reason():
    trainer, _, _ = trained("auto(2)", lambda: build_seeded(Centered), num_measured_plans=8)
    failed = {one.plan: one.reason for one in trainer.choice.failed_trials}
    assert any("depends on the other samples" in reason for reason in failed.values())
    assert trainer.choice.plan not in failed


class Centered(torch.nn.Sequential):
    """Its output for a sample depends on the others."""

    def __init__(self):
        super().__init__(torch.nn.Linear(6, 64), Minus(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 3))


class Minus(torch.nn.Module):
    """Subtracts the mean of the batch."""

    def forward(self, x):
        return x - x.mean(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"strategy": "data(2)", "num_measured_plans": 2},
            r"num_measured_plans=2 is the number of plans that are measured .* the plan is given, data",
        ),
        ({"strategy": "auto(2)", "num_measured_plans": -1}, "num_measured_plans=-1 is negative"),
        ({"strategy": "auto(2)", "num_measured_plans": True}, "num_measured_plans=True is a bool; give a whole number"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, message):
    with pytest.raises(cp.PlanError, match=message):
        cp.Trainer(mlp(), loss=F.cross_entropy, optimizer=ADAMW, **options)


@pytest.mark.long
def test_data_parallelism_the_choice_and_the_fastest_are_worth_measuring():
    choice = chosen(4)
    plans = [str(plan) for plan in candidates_to_measure(choice, 2)]
    assert "data(4)" in plans
    assert str(choice.plan) in plans
    assert len(plans) == 3


def test_plans_that_do_not_fit_into_memory_with_the_others_are_not_measured():
    whole = chosen(2)
    data = next(result for result in whole.ranking.predictions if str(result.plan) == "data(2)")
    tight = PlanningProblem(QUESTION.model, Cluster(Device(memory_bytes=2 * data.memory_bytes)), 16)
    few = candidates_to_measure(chosen(2, tight), 5)
    assert str(few[0]) == "data(2)"
    assert len(few) < len(candidates_to_measure(whole, 5))


def test_the_fastest_is_taken_or_a_simpler_one_that_is_nearly_as_fast():
    choice = chosen(2)
    _, zero, other = choice.by_simplicity[:3]
    assert decide_by_trials(choice, [PlanTrial(zero, 1.01), PlanTrial(other, 1.0)]).plan == zero
    assert decide_by_trials(choice, [PlanTrial(zero, 1.03), PlanTrial(other, 1.0)]).plan == other
    assert decide_by_trials(choice, []).plan == choice.plan


def test_data_parallelism_is_taken_unless_another_plan_is_faster_by_more_than_runs_differ():
    choice = chosen(2)
    data, zero = choice.by_simplicity[:2]
    best = PlanTrial(zero, 1.0, round_times_s=(1.0, 1.0, 1.0))
    assert decide_by_trials(choice, [PlanTrial(data, 1.07, round_times_s=(1.06, 1.07, 1.1)), best]).plan == data
    assert decide_by_trials(choice, [PlanTrial(data, 1.09, round_times_s=(1.09, 0.99, 1.1)), best]).plan == zero


def test_a_simpler_plan_that_was_as_fast_in_one_of_five_rounds_is_chosen_unless_much_slower():
    choice = chosen(2)
    _, zero, other = choice.by_simplicity[:3]
    best = PlanTrial(other, 1.0, round_times_s=(1.0, 1.0, 1.0))
    assert decide_by_trials(choice, [PlanTrial(zero, 1.04, round_times_s=(1.04, 0.99, 1.1)), best]).plan == zero
    assert decide_by_trials(choice, [PlanTrial(zero, 1.04, round_times_s=(1.04, 1.01, 1.1)), best]).plan == other
    assert decide_by_trials(choice, [PlanTrial(zero, 1.06, round_times_s=(1.06, 0.99, 1.1)), best]).plan == other
    best = PlanTrial(other, 1.0, round_times_s=(1.0,) * 6)
    assert decide_by_trials(choice, [PlanTrial(zero, 1.04, round_times_s=(0.99, *(1.04,) * 5)), best]).plan == other


def test_a_plan_as_fast_in_one_round_but_slower_than_a_simpler_one_is_not_chosen():
    choice = chosen(2)
    simple, other, best = choice.by_simplicity[1:4]
    trials = [
        PlanTrial(simple, 1.05, round_times_s=(1.05, 1.04)),
        PlanTrial(other, 1.09, round_times_s=(1.2, 0.98)),
        PlanTrial(best, 1.0, round_times_s=(1.0, 1.0)),
    ]
    assert decide_by_trials(choice, trials).plan == best


def test_a_plan_is_not_slower_because_its_rounds_were():
    data, zero = chosen(2).by_simplicity[:2]
    turns = [(1.0, 1.5, 1.5, 1.0, 1.5), (1.1, 1.1, 1.65, 1.1, 1.65)]  # the second plan's turn in a slow round was not
    trials = normalize_speed(
        [PlanTrial(plan, 1.0, round_times_s=own) for plan, own in zip((data, zero), turns, strict=True)]
    )
    assert trials[1].step_s / trials[0].step_s == pytest.approx(1.1)
    assert [trial.round_times_s for trial in trials] == turns


def test_a_round_was_as_fast_as_those_plans_were_that_had_the_most_turns():
    plans = chosen(2).by_simplicity[:3]
    turns = [(2.0, 1.0, 1.0), (3.0,), (4.0, 2.0, 2.0)]  # the first round was slow, and the second plan had no other
    trials = normalize_speed([PlanTrial(plan, 9.0, round_times_s=own) for plan, own in zip(plans, turns, strict=True)])
    assert [trial.step_s for trial in trials] == pytest.approx([1.0, 1.5, 2.0])


def test_a_plan_without_rounds_keeps_its_time():
    data, zero = chosen(2).by_simplicity[:2]
    given_up = PlanTrial(zero, 9.0)
    assert normalize_speed([PlanTrial(data, 2.0, round_times_s=(2.0, 2.0)), given_up])[1] == given_up
    assert normalize_speed([given_up]) == [given_up]


@pytest.mark.long
def test_the_best_of_each_kind_is_tried_before_a_second_one_of_a_kind():
    choice = chosen(4, PlanningProblem(layers(16, cost=1e9), Cluster(), 16))
    kinds = [tuple(map(type, plan.strategies)) for plan in candidates_to_measure(choice, 3)]
    assert len(set(kinds)) == len(kinds) == 4


def test_a_plan_that_is_far_too_slow_gets_no_rounds():
    runners = [Steps(1.0), Steps(3.0), Steps(5.0)]
    run_interleaved(runners)
    assert [len(runner.round_times_s) for runner in runners] == [ROUNDS, ROUNDS, 0]


def test_plans_close_to_the_fastest_get_more_rounds_the_closer_the_more():
    assert NEAR_FASTEST_FACTORS == (1.25, 1.1)
    runners = [Steps(1.2), Steps(1.0), Steps(1.3), Steps(1.05)]
    run_interleaved(runners)
    assert [len(runner.round_times_s) // ROUNDS for runner in runners] == [2, 3, 1, 3]


def test_there_are_no_more_rounds_once_one_plan_is_left():
    runners = [Steps(1.0), Steps(1.2), Steps(2.0)]
    run_interleaved(runners)
    assert [len(runner.round_times_s) // ROUNDS for runner in runners] == [2, 2, 1]


class Steps(TrialRunner):
    """A plan whose steps take no time here."""

    def __init__(self, warm_s, nothing=None):
        super().__init__(nothing, nothing, nothing, warm_s=warm_s)

    def step(self):
        return self.warm_s

    def max_over_ranks(self, seconds):
        return seconds
