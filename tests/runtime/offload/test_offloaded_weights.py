"""Shards of weights on disk: the same bits come back, one is open between steps, and a full disk is an error."""

import os
import resource
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import counterpoint as cp
from counterpoint.errors import OffloadError, PlanError
from counterpoint.runtime.offload.chunk_file import BLOCK_BYTES
from counterpoint.runtime.offload.offloaded_weights import OffloadedWeights, WeightOffloadConfig
from counterpoint.testing.parity_models import plan_for
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from tests.training.trainers import equal_bits, mlp, params_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of file systems in memory


@pytest.fixture(name="weights")
def make_weights(tmp_path):
    weights = OffloadedWeights(WeightOffloadConfig(str(tmp_path), 30.0), 3)
    yield weights
    weights.file.close()


def count_deleted_files():
    """Return how many open files of this process have no name any more."""
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(" (deleted)" in str(path.readlink()) for path in links if path.is_symlink())


def values_of(shard):
    shard.start_read()
    found = shard.read_whole().clone()
    shard.finish()
    return found


@pytest.mark.parametrize("value", [torch.randn(5000), torch.randn(3).bfloat16(), torch.ones(0), torch.arange(7.0)])
def test_a_shard_comes_back_with_its_bits_and_takes_no_memory(weights, value):
    first, shard = weights.add(torch.ones(9)), weights.add(value.clone())
    assert (shard.shard.untyped_storage().size(), shard.is_resident) == (0, False)
    assert torch.equal(values_of(shard), value)
    assert torch.equal(values_of(first), torch.ones(9))


def test_an_update_changes_views_that_were_made_while_it_was_away(weights):
    shard = weights.add(torch.arange(8.0))
    view = shard.view_shard(2, 4)
    shard.start_read()
    shard.load()
    view.add_(10)
    shard.start_write()
    shard.finish()
    assert values_of(shard).tolist() == [0, 1, 12, 13, 4, 5, 6, 7]


def test_changes_between_steps_are_written_before_a_step_reads(weights):
    first, second = weights.add(torch.zeros(4)), weights.add(torch.zeros(4))
    first.write(1, torch.ones(2))
    second.write(0, torch.ones(1))
    assert (first.buffer, second.buffer is None) == (None, False)
    assert [values_of(shard).tolist() for shard in (first, second)] == [[0, 1, 1, 0], [1, 0, 0, 0]]
    assert second.read(0, 2).tolist() == [1, 0]


def test_what_a_failed_step_has_read_is_forgotten(weights):
    shard = weights.add(torch.ones(4))
    shard.start_read()
    shard.load()
    shard.shard.data.zero_()
    weights.clear()
    assert not shard.is_resident
    assert values_of(shard).tolist() == [1, 1, 1, 1]


def test_a_shard_that_is_still_written_is_read_afterwards(weights, monkeypatch):
    """As by ``full_weights()`` after the update of a later unit has failed."""
    shard, may_write, write = weights.add(torch.ones(4)), threading.Event(), os.pwritev
    shard.start_read()
    shard.load()
    shard.shard.data.fill_(2)
    monkeypatch.setattr(os, "pwritev", lambda *args: may_write.wait(30) and write(*args))
    shard.start_write()
    weights.clear()
    timer = threading.Timer(0.1, may_write.set)
    timer.start()
    assert shard.read(0, 4).tolist() == [2, 2, 2, 2]
    timer.join()


@pytest.mark.parametrize("passes", ["offload:params=disk", "offload:state=disk"])
def test_ranks_that_are_built_again_close_the_files_of_the_ones_before(passes, tmp_path):
    model = mlp()
    plan = replace(plan_for("zero(2, level=3)", 12), passes=("overlap", passes))
    optimizer, x = torch.optim.Adam(model.parameters()), torch.ones(12, 6).double()
    with cp.parallelize(model, optimizer, lambda y, _: y.mean(), strategy=plan, offload_folder=tmp_path) as step:
        counts = []
        for index in range(4):
            next(model.parameters()).requires_grad_(index % 2 == 0)
            step(x, x)
            counts.append(count_deleted_files())
    assert counts == counts[:1] * 4


def test_a_changed_byte_is_an_error_that_later_steps_repeat(weights):
    shard = weights.add(torch.ones(4))
    weights.file.checksums[shard.span.index] += 1
    shard.start_read()
    with pytest.raises(OffloadError, match=r"offload file of rank 3 in .*: chunk 0, 4096 bytes .* another checksum"):
        shard.read_whole()
    with pytest.raises(OffloadError, match="the shard of the weights was lost in an earlier step; resume from a check"):
        shard.start_read()


def test_a_shard_that_does_not_fit_is_an_error_with_a_remedy(weights, monkeypatch):
    weights.add(torch.ones(4))
    monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs_result((1, 1, 1, 1, 8, 1, 1, 1, 1, 1)))
    with pytest.raises(
        OffloadError,
        match=r"needs 4096 bytes more for the shard of the weights of this rank, but 8 are free.* with zero\(.*level=3",
    ):
        weights.add(torch.ones(4))


def train_once(model=None, **options):
    model = model or mlp()
    options = {"strategy": "zero3(2)", "passes": ("overlap", "offload:params=disk"), **options}
    with cp.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, **options) as step:
        step(torch.ones(4, 6, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64))


def test_a_full_disk_is_an_error_before_the_first_step(tmp_path):
    model = mlp()
    before = params_of(model)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES, limits[1]))  # of a file
    try:
        with pytest.raises(OffloadError, match=r"needs 4096 bytes more for the shard of the weights.*`ulimit -f`"):
            train_once(model, offload_folder=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert equal_bits(params_of(model), before)
    assert not [*tmp_path.iterdir()]


def test_a_missing_folder_and_a_device_are_refused(tmp_path):
    with pytest.raises(PlanError, match="offload:params=disk needs a folder for the weights; give offload_folder"):
        train_once()
    with pytest.raises(PlanError, match="is for ranks that compute on CPUs, but the model is on a device; drop"):
        train_once(device=StandInAccelerator(), offload_folder=tmp_path)
