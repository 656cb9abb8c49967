"""Custom loops in real processes: every rank passes the same batch; otherwise all get an error."""

import re

import pytest
import torch

from counterpoint.launchers import run_command, script_command
from tests.process import rank_functions as ranks
from tests.process.forked_ranks import run_forked
from tests.process.test_faults import variables
from tests.training.several_models import PlainStep, train_adversaries, train_in_turns
from tests.training.trainers import max_difference

pytestmark = pytest.mark.process


def run_ranks(fn, *args):
    """Return the error of each of two ranks that run the function."""
    return run_forked(fn, ranks=2, args=args)


def test_ranks_with_batches_of_different_sizes_do_not_train():
    """They did, each on a part of its own, and the losses looked well."""
    first, second = run_ranks(ranks.shard_by_hand, [12, 16])
    assert first == second
    assert first.startswith(
        "DataError: the ranks were given different data: the size of the batch is 12 samples on rank 0, 16 "
    )


def test_a_batch_that_is_another_on_one_rank_later_ends_the_run():
    first, second = run_ranks(ranks.shard_by_hand, [12, 12], [12, 16])
    assert first == second
    assert first.startswith(
        "DataError: the ranks were given different values for step 1: the form of the batch is float64 (12, 6), "
    )


def test_ranks_whose_batches_differ_in_content_do_not_train():
    """A DistributedSampler gave each rank samples of its own, and each trained on a part of them: half were lost."""
    first, second = run_ranks(ranks.pass_own_batches)
    assert first == second
    assert first.startswith("DataError: the ranks were given different data: the content of the batch is digest ")


def test_a_batch_that_one_rank_refuses_ends_the_others():
    """They waited for it in the step, and then said that the ranks disagree on a collective."""
    first, second = run_ranks(ranks.branch_in_one_half)
    assert second.startswith("PlanError: the output of BranchingLinear for a sample depends on the other samples of")
    assert first.startswith("PeerError: rank 0 waited ")
    assert ": stopped because of rank 1: PlanError: the output of" in first


@pytest.mark.long
def test_ranks_that_shard_the_dataset_themselves_do_not_train():
    first, second = run_ranks(ranks.shard_the_dataset)
    assert first == second
    assert re.match(
        r"DataError: the ranks were given different data: the dataset is 23 samples of .* on rank 0, "
        r"2\d samples of .* on rank 1; every rank passes the whole data and reads its own samples of them: remove the s",
        first,
    )


@pytest.mark.long(quick=["loader"])
@pytest.mark.parametrize("kind", ["loader", "collated", "stream"])
def test_processes_train_on_any_data_as_one_process_does(kind):
    results = run_ranks(ranks.train_on, kind)
    losses, params = ranks.train_on(kind)
    for others, values in results:
        assert others == pytest.approx(losses, rel=1e-12)
        assert (
            max_difference(*({name: torch.tensor(part[name]) for name in params} for part in (values, params))) < 1e-12
        )


@pytest.mark.long(quick=["seed-..."])
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("seed", "PlanError: the ranks do not train the same model: the option seed is 0 on rank 0, 5 on rank 1; give"),
        (
            "epochs",
            "PlanError: the ranks do not make the same call: the argument epochs is 1 on rank 0, 3 on rank 1; give",
        ),
        ("sampler", "DataError: the ranks were given different data: the order of samples is ["),
        ("second call", "DataError: the ranks were given different data: the order of samples is ["),
    ],
)
def test_what_is_another_one_on_one_rank_is_named_before_the_first_step(what, text):
    first, second = run_ranks(ranks.differ_in, what)
    assert first == second
    assert first.startswith(text)


UNGUARDED = """
import torch, counterpoint as cp
from tests.data.samples import Numbers
model = torch.nn.Linear(1, 1)
trainer = cp.Trainer(model, loss=lambda a, b: (a.squeeze(1) - b).square().mean(),
                     optimizer=lambda params: torch.optim.SGD(params, 0.01), progress="off")
trainer.fit(Numbers(), batch_size=6, num_workers=1)
"""


@pytest.mark.slow
def test_a_script_that_trains_when_a_worker_imports_it_is_ended_with_the_remedy(tmp_path, monkeypatch):
    """Its worker met the other ranks as one of them, and all waited."""
    monkeypatch.setenv("PYTHONPATH", variables()["PYTHONPATH"])  # the script imports from these tests
    (tmp_path / "script.py").write_text(UNGUARDED)
    lines = []
    command = script_command(tmp_path / "script.py")
    result = run_command(command, 1, on_line=lambda line: lines.append(line.text))
    assert result.report.startswith("rank 0 failed: DataError: loader worker 0 (pid ")
    assert "main part under `if __name__ == '__main__':`" in result.report
    assert any("LaunchError: this is loader worker 0, which imports the script of" in text for text in lines)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["data(2)", "zero3(2)", "pipeline(2)"])
def test_several_models_and_turns_are_trained_as_in_a_plain_loop(strategy):
    expected = train_adversaries(PlainStep, PlainStep)[0] + train_in_turns(PlainStep, PlainStep)[0]
    for losses in run_ranks(ranks.train_several, strategy):
        assert losses == pytest.approx(expected, abs=1e-12)
