"""A fit whose samples are read by worker processes: the same numbers, every sample once, and nothing left behind."""

import multiprocessing
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import counterpoint as cp
from counterpoint.testing.parity_models import plan_for
from counterpoint.training.batches.global_batch import microbatches_to_read, warn_forked_workers
from tests.data.samples import Drawn, FailsAt, Noted, read_by_workers
from tests.training.trainers import StopAt, dataset, equal_bits, list_rank_threads, make_trainer, state_of


def small():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Linear(3, 1)


def fit(data, strategy="data(2)", *, resume=None, callbacks=(), num_inputs=3, batch_size=8, **options):
    """Return the state of a model and the losses after two epochs."""
    model = small() if num_inputs == 3 else nn.Linear(num_inputs, 1)
    settings = {"loss": lambda result, wanted: (result.squeeze(1) - wanted.float() / 24).square().mean()}
    with make_trainer(strategy, model, optimizer=lambda params: torch.optim.SGD(params, 0.01), callbacks=callbacks,
                 **settings) as one:  # fmt: skip
        history = one.fit(data, batch_size=batch_size, epochs=2, resume=resume, **options)
        return state_of(model), history.losses


@pytest.mark.long(quick=["pipeline(1) * data(4)"])
@pytest.mark.process
@pytest.mark.parametrize("strategy", ["data(2)", "pipeline(1) * data(4)"])
def test_a_fit_with_noise_is_the_same_bit_for_bit_with_workers(strategy):
    whole, losses = fit(Drawn(), strategy)
    result, others = fit(Drawn(), strategy, num_workers=2)
    assert others == losses
    assert equal_bits(result, whole)


def test_noise_does_not_depend_on_the_number_of_ranks():
    losses = [fit(Drawn(), cp.Plan.parse(f"data({ranks})"))[1] for ranks in (1, 2, 4)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.process
def test_with_workers_a_run_continues_in_mid_epoch_and_reads_only_the_rest(tmp_path):
    whole, losses = fit(Drawn())
    with pytest.raises(KeyboardInterrupt):
        fit(Drawn(), callbacks=[StopAt(1)], num_workers=2, checkpoint_dir=tmp_path, save_every=1)
    result, rest = fit(Drawn(), resume=tmp_path, num_workers=1)
    assert rest == losses[1:]
    assert equal_bits(result, whole)
    assert multiprocessing.active_children() == []


@pytest.mark.process
def test_every_sample_is_read_once_in_an_epoch_whatever_the_ranks(tmp_path):
    fit(Noted(tmp_path / "read"), num_inputs=1, num_workers=2)
    assert sorted(read_by_workers(tmp_path / "read")) == sorted([*range(24), *range(24)])


@pytest.mark.process
def test_an_error_in_a_worker_ends_the_fit_with_the_sample_and_no_worker_is_left():
    with pytest.raises(cp.DataError, match=r"^loader worker \d \(pid \d+\) failed while reading sample 7 of"):
        fit(FailsAt(7, "fail"), num_inputs=1, num_workers=2)
    assert multiprocessing.active_children() == []
    assert list_rank_threads() == []


def test_the_order_differs_in_every_epoch_without_set_epoch(tmp_path):
    fit(Noted(tmp_path / "read"), cp.Plan.parse("data(1)"), num_inputs=1)
    read = [int(line.split()[0]) for line in (tmp_path / "read").read_text().splitlines()][-48:]
    assert sorted(read[:24]) == sorted(read[24:]) == list(range(24))
    assert read[:24] != read[24:]


def test_a_rank_reads_only_the_microbatches_that_it_begins_or_ends():
    def read(strategy, *ranks):
        with make_trainer(plan_for(strategy, 4)) as one:
            one.fit(dataset(), batch_size=12, max_steps=1)
            assert one.compiled is not None
            return [microbatches_to_read(one.compiled.program, [rank]) for rank in ranks]

    assert read("data(2)", 0, 1) == [[0, 1], [2, 3]]
    assert read("pipeline(2)", 0, 1) == [[0, 1, 2, 3]] * 2


def test_a_loader_is_answered_with_the_call_that_does_the_same():
    data = dataset()
    loader = DataLoader(data, batch_size=4, num_workers=1, sampler=DistributedSampler(data, 2, 0))
    with pytest.raises(cp.DataError) as caught:
        make_trainer("solo").fit(loader, batch_size=12)
    assert str(caught.value).endswith(
        "the trainer does batching, order and sharding: fit(loader.dataset, batch_size=4 x ranks, num_workers=1), without "
        "the DistributedSampler and its set_epoch"
    )


def pad_dicts(samples):
    """Make a batch of samples, read where random numbers are those of its samples."""
    inputs = torch.stack([sample[0] for sample in samples])
    return {"input": inputs + torch.rand(()), "labels": torch.tensor([sample[1] for sample in samples])}


@pytest.mark.process
def test_the_workers_of_a_loader_give_what_this_process_would_read():
    data: Any = Drawn()
    whole, rest = (
        fit(DataLoader(data, 8, shuffle=True, collate_fn=pad_dicts, num_workers=num), batch_size=None) for num in (0, 2)
    )
    assert rest[1] == whole[1]
    assert equal_bits(rest[0], whole[0])
    assert multiprocessing.active_children() == []


def test_a_number_of_workers_that_is_none_is_refused():
    with pytest.raises(cp.PlanError, match=r"^num_workers=-1 is not a count"):
        fit(Drawn(), num_workers=-1)


@pytest.mark.parametrize("how", ["fork", None])
def test_processes_forked_with_threads_are_warned_of_once(how):
    """A lock that a thread held at the fork stays locked in the copy, and a worker hangs once in a thousand runs.

    A loader that is told nothing forks in the system's own way, which was taken for another one.
    """
    context: Any = multiprocessing.get_context(how)
    known: set[int] = set()
    gate, done = context.Event(), threading.Event()
    child = context.Process(target=gate.wait)
    child.start()
    threading.Thread(target=done.wait).start()
    try:
        with pytest.warns(
            RuntimeWarning, match=r"^1 worker \(pid \d+\) came from a fork of this process, which has \d"
        ):
            assert warn_forked_workers(known)
        assert not warn_forked_workers(known)
    finally:
        done.set()
        gate.set()
        child.join()
