"""Inputs of blocks on disk: the same bits come back, places are used again, and a full disk is an error with a remedy."""

import resource

import pytest
import torch
import torch.nn.functional as F

import counterpoint as cp
from counterpoint.errors import OffloadError, PlanError
from counterpoint.runtime.offload.chunk_file import BLOCK_BYTES
from counterpoint.runtime.offload.offloaded_inputs import InputOffloadConfig, OffloadedInputs
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from tests.training.trainers import equal_bits, mlp, params_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of file systems in memory
PASSES = ("recompute", "offload:activations=disk")


@pytest.fixture(name="inputs")
def make_inputs(tmp_path):
    inputs = OffloadedInputs(InputOffloadConfig(str(tmp_path), 30.0), 3)
    yield inputs
    inputs.file.close()


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3, 5, 7),
        torch.randn(3, 5, 7).permute(2, 0, 1),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(9).bfloat16(),
        torch.arange(5),
        torch.tensor([True, False]),
        torch.randn(4, 6)[2:],
    ],
    ids=lambda value: f"{value.dtype}-{value.stride()}",
)
def test_a_value_comes_back_with_its_bits_and_strides(inputs, value):
    assert inputs.start_write((1, 0), value, requires_grad=True)
    inputs.start_read((1, 0))
    found, requires_grad = inputs.take((1, 0))
    assert torch.equal(found, value)
    assert (found.stride(), found.dtype, requires_grad) == (value.stride(), value.dtype, True)


@pytest.mark.parametrize("value", [torch.ones(1).expand(4), torch.ones(4, 6)[:, 1:], torch.ones(0)])
def test_a_value_that_does_not_fill_its_memory_stays(inputs, value):
    assert not inputs.start_write((1, 0), value, requires_grad=False)
    inputs.start_read((1, 0))
    assert inputs.take((1, 0)) is None


def test_places_are_used_again(inputs):
    for _ in range(3):
        for key in range(4):
            inputs.start_write((key, 0), torch.full((1000,), float(key)), requires_grad=False)
        for key in reversed(range(4)):
            inputs.start_read((key, 0))
            assert inputs.take((key, 0))[0].eq(key).all()
    assert inputs.num_spans == 4


def test_what_a_failed_step_has_written_is_forgotten(inputs):
    inputs.start_write((1, 0), torch.ones(10), requires_grad=False)
    inputs.start_write((2, 0), torch.ones(10), requires_grad=False)
    inputs.start_read((1, 0))
    inputs.clear()
    assert inputs.take((1, 0)) is None
    assert len(inputs.free_spans) == inputs.num_spans == 2


def test_a_disk_that_gets_full_is_an_error_with_a_remedy(inputs):
    inputs.start_write((1, 0), torch.ones(10), requires_grad=False)
    with pytest.raises(OffloadError, match=r"bytes more for the input of recomputed blocks.* are free.*smaller micro"):
        inputs.take_span(1 << 60)
    with pytest.raises(OffloadError, match="the file was closed by an error of an earlier step; build ranks again"):
        inputs.start_write((2, 0), torch.ones(10), requires_grad=False)


def train_once(model=None, **options):
    model = model or mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, optimizer, F.mse_loss, strategy="solo", passes=PASSES, **options) as step:
        step(torch.ones(4, 6, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64))


def test_a_full_disk_ends_the_first_step_before_a_weight_changes(tmp_path):
    model = mlp()
    before = params_of(model)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES - 1, limits[1]))  # of a file
    try:
        with pytest.raises(OffloadError, match=r"needs 4096 bytes for the input of recomputed blocks of this rank"):
            train_once(model, offload_folder=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert equal_bits(params_of(model), before)


def test_a_missing_folder_and_a_device_are_refused(tmp_path):
    with pytest.raises(PlanError, match="needs a folder for the inputs; give offload_folder"):
        train_once()
    with pytest.raises(PlanError, match="is for ranks that compute on CPUs, but the model is on a device; drop"):
        train_once(device=StandInAccelerator(), offload_folder=tmp_path)


def test_lengths_that_change_with_every_batch_find_a_place(tmp_path):
    inputs = OffloadedInputs(InputOffloadConfig(str(tmp_path), 30.0), 0)
    lengths = torch.randint(1, 40, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    for length in lengths:
        values = [torch.full((length * BLOCK_BYTES // 4,), float(layer)) for layer in range(3)]
        for layer, value in enumerate(values):
            assert inputs.start_write((layer, 0), value, requires_grad=True)
        for layer, value in enumerate(values):
            inputs.start_read((layer, 0))
            found = inputs.take((layer, 0))
            assert found is not None
            assert torch.equal(found[0], value)
    assert inputs.num_bytes <= 3 * (2 + 4 + 8 + 16 + 32 + 64) * BLOCK_BYTES
