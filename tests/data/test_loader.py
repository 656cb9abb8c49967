"""Workers read what one process would have read, in its order, and none outlives the run."""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from counterpoint.data.loader import MicrobatchLoader, iter_microbatch_indices
from counterpoint.data.microbatch_reader import MicrobatchIndex, MicrobatchReader
from counterpoint.data.sampler import Sampler
from counterpoint.errors import DataError
from tests.data.samples import Drawn, DrawnTogether, FailsAt, Noted, Numbers, Unsendable, read_by_workers

pytestmark = pytest.mark.process


def reader_of(dataset, num_micros=2, *, batch_size=6, shuffle="feistel"):
    return MicrobatchReader(dataset, Sampler(len(dataset), batch_size, 5, shuffle=shuffle), num_micros)


@contextmanager
def loading(reader, workers=2, *, first=(0, 0), num_batches=4, prefetch=2, timeout_s=30.0):
    """Yield a loader and the places that it reads."""
    indices = list(iter_microbatch_indices(reader, first, num_batches, range(reader.num_micros)))
    loader = MicrobatchLoader(reader, iter(indices), num_workers=workers, prefetch_factor=prefetch, timeout_s=timeout_s)
    try:
        yield loader, indices
    finally:
        loader.close()


def read_all(loader, indices):
    for index in indices:
        loader.get_samples(index)


def refused(dataset, **options):
    """Return why a loader gives up on a dataset in the order of its samples; none of its workers is left."""
    with loading(reader_of(dataset, shuffle="sequential"), **options) as (loader, indices):
        watched = [os.pidfd_open(worker.process.pid) for worker in loader.workers]
        with pytest.raises(DataError) as caught:
            read_all(loader, indices)
    assert are_gone(watched)
    return str(caught.value)


def are_gone(pidfds, seconds=10.0):
    """Tell whether all processes end in time."""
    for pidfd in pidfds:
        with os.fdopen(pidfd):
            if not select.select([pidfd], [], [], seconds)[0]:
                return False
    return True


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_give_what_this_process_would_read_bit_for_bit(workers):
    reader = reader_of(Drawn())
    with loading(reader, workers, num_batches=6) as (loader, indices):
        assert [index.epoch for index in (indices[0], indices[-1])] == [0, 1]
        for index in indices:
            for loaded, expected in zip(loader.get_samples(index), reader.read(index), strict=True):
                assert torch.equal(loaded, expected)


def test_what_a_sample_draws_does_not_depend_on_how_many_share_a_batch():
    """Noise from a worker's own seed was another one for every number of workers and ranks."""
    whole = reader_of(Drawn(), 1).read(MicrobatchIndex(1, 2, 0))
    for num_micros in (2, 3, 6):
        parts = [reader_of(Drawn(), num_micros).read(MicrobatchIndex(1, 2, micro)) for micro in range(num_micros)]
        assert torch.equal(torch.cat([part[0] for part in parts]), whole[0])


def test_a_sample_draws_anew_in_every_epoch_and_costs_no_random_number_of_ours():
    reader = reader_of(Drawn(), 1, batch_size=24, shuffle="sequential")
    torch.manual_seed(1)
    first, second = (reader.read(MicrobatchIndex(epoch, 0, 0))[0] for epoch in (0, 1))
    assert not (first == second).any()
    drawn = torch.rand(())
    torch.manual_seed(1)
    assert drawn == torch.rand(())


def test_drawing_for_many_samples_at_once_is_warned_of():
    with pytest.warns(RuntimeWarning, match=r"^DrawnTogether draws global random numbers for many samples at once, so"):
        reader_of(DrawnTogether()).warn_of_shared_rng(MicrobatchIndex(0, 0, 0))
    reader_of(Drawn()).warn_of_shared_rng(MicrobatchIndex(0, 0, 0))


def test_a_run_that_resumes_in_mid_epoch_reads_no_sample_again(tmp_path):
    reader = reader_of(Noted(tmp_path / "read"))
    with loading(reader, first=(0, 2), num_batches=2) as (loader, indices):
        read_all(loader, indices)
    wanted = [index for batch in (2, 3) for index in reader.sampler.batch(0, batch).tolist()]
    assert sorted(read_by_workers(tmp_path / "read")) == sorted(wanted)


def test_no_more_is_read_ahead_than_was_asked_for(tmp_path):
    reader = reader_of(Noted(tmp_path / "read"), 1, batch_size=1)
    with loading(reader, 2, num_batches=20, prefetch=3) as (loader, indices):
        for index in indices[:8]:
            loader.get_samples(index)
            assert [len(worker.pending) for worker in loader.workers] == [3, 3]
    assert len(read_by_workers(tmp_path / "read")) <= 8 + 2 * 3


def test_unrequested_microbatches_are_discarded():
    with loading(reader_of(Numbers())) as (loader, indices):
        for index in indices[1::2]:
            assert loader.get_samples(index)[1].tolist() == reader_of(Numbers()).indices(index).tolist()
            assert len(loader.buffered) <= 1


def test_an_error_says_which_sample_and_where_in_the_users_code():
    text = refused(FailsAt(7, "fail"))
    first, *rest = text.splitlines()
    assert first.startswith("loader worker 0 (pid ")
    assert first.endswith(") failed while reading sample 7 of the FailsAt: ValueError: the file is cut short")
    assert 'raise ValueError("the file is cut short")' in "\n".join(rest)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        (
            "die",
            "was killed by SIGKILL while reading microbatch 0 of batch 1 in epoch 0; unless a user sent it, the kernel",
        ),
        ("leave", "ended with exit code 3 while reading microbatch 0 of batch 1 in epoch 0; see its last"),
    ],
)
def test_a_worker_that_ends_is_named_at_once(how, what):
    began = time.monotonic()
    text = refused(FailsAt(7, how))
    assert text.startswith("loader worker 0 (pid ")
    assert what in text
    assert time.monotonic() - began < 20


def test_a_worker_that_hangs_is_named_within_the_deadline_with_its_stack():
    text = refused(FailsAt(7, "hang"), timeout_s=0.5)
    assert "has not read microbatch 0 of batch 1 in epoch 0 within 0.5 s; give a longer timeout_s for a slow" in text
    assert "samples.py" in text
    assert "in hang" in text


def test_a_dataset_that_cannot_travel_is_refused_with_the_remedy():
    with pytest.raises(
        DataError, match=r"^a Unsendable cannot be sent to a loader's worker: .*; a dataset for workers has its"
    ):
        MicrobatchLoader(reader_of(Unsendable()), iter(()), num_workers=1, prefetch_factor=1, timeout_s=1.0)


OWNER = """
import sys
from counterpoint.data.loader import MicrobatchLoader, iter_microbatch_indices
from counterpoint.data.microbatch_reader import MicrobatchReader
from counterpoint.data.sampler import Sampler
from tests.data.samples import FailsAt
if __name__ == "__main__":
    reader = MicrobatchReader(FailsAt(7, "hang"), Sampler(24, 6, shuffle="sequential"), 2)
    indices = iter_microbatch_indices(reader, (0, 0), 4, (0, 1))
    loader = MicrobatchLoader(reader, indices, num_workers=2, prefetch_factor=2, timeout_s=60)
    loader.receive_next()
    loader.receive_next()
    print(*[worker.process.pid for worker in loader.workers], flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_kill_9_of_the_trainer_ends_its_workers_though_one_hangs(tmp_path):
    (tmp_path / "owner.py").write_text(OWNER)
    root = Path(__file__).parents[2]
    variables = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
    command = [sys.executable, str(tmp_path / "owner.py")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as owner:
        assert owner.stdout is not None
        watched = [os.pidfd_open(int(pid)) for pid in owner.stdout.readline().split()]
        owner.send_signal(signal.SIGKILL)
    assert len(watched) == 2
    assert are_gone(watched)
