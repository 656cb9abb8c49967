"""Training goes on from a checkpoint, and a plan is chosen, on a device as on the CPU."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import TensorDataset

import counterpoint as cp
from counterpoint.optim.low_bit_adam import AdamW8bit
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE

ADAMW = partial(optim.AdamW, lr=0.01)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=[StandInAccelerator().device.type, pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """A device that is not the host: the stand-in one, or a GPU where there is one."""
    return request.param


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, 24), nn.Linear(24, 4)).double()


def samples():
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(16, 8, generator=draw, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 4, (16,), generator=draw))


def fit(device, strategy, folder, epochs, optimizer=ADAMW, **options):
    trainer = cp.Trainer(
        build(), loss=F.cross_entropy, optimizer=optimizer, strategy=strategy, progress="off", device=device
    )
    with trainer:
        history = trainer.fit(samples(), batch_size=8, epochs=epochs, checkpoint_dir=folder, **options)
    return history.losses


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("zero(2, level=3)", "pipeline(2)"),
        ("data(2, compress=topk)", "data(2, compress=topk)"),
        ("data(2, compress=powersgd)", "data(2, compress=powersgd)"),
        ("data(2, staleness=1)", "data(2, staleness=1)"),
    ],
)
def test_training_goes_on_from_a_checkpoint_with_every_state_on_the_device(tmp_path, device, first, second):
    losses = {}
    for name in ("cpu", device):
        fit(name, first, tmp_path / name, 1, save_every=2)
        losses[name] = fit(name, second, tmp_path / name, 3, resume="auto")
    assert losses[device] == pytest.approx(losses["cpu"], rel=1e-12)
    assert len(losses["cpu"]) == 4


@pytest.mark.long
def test_a_state_of_8_bits_is_kept_on_the_device_and_in_its_checkpoints(tmp_path, device):
    optimizer, losses = partial(AdamW8bit, lr=0.01, min_8bit_size=1), {}
    for name in ("cpu", device):
        fit(name, "zero(2)", tmp_path / name, 1, optimizer, save_every=2)
        losses[name] = fit(name, "data(2)", tmp_path / name, 3, optimizer, resume="auto")
    assert losses[device] == pytest.approx(losses["cpu"], rel=1e-12)


def test_a_checkpoint_of_the_device_is_one_of_the_cpu(tmp_path, device):
    fit(device, "solo", tmp_path, 1, save_every=2)
    assert fit("cpu", "solo", tmp_path, 2, resume="auto") == pytest.approx(
        fit("cpu", "solo", tmp_path / "cpu", 2)[2:], rel=1e-12
    )


def test_gradients_norms_and_state_can_be_read(device):
    def read(device):
        model = build()
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        with cp.parallelize(model, optimizer, F.cross_entropy, strategy="zero3(2)", device=device) as step:
            step(*samples()[:8])
            norms, state = step.grad_norms(), step.full_optimizer_state()
            step.import_weights()
            step(*samples()[:8])
        return [*norms.values(), *(float(each["exp_avg"].sum()) for each in state["state"].values())]

    assert read(device) == pytest.approx(read("cpu"), rel=1e-9)


def test_a_loss_that_is_a_module_is_moved_too(device):
    def train(device):
        model, loss = build(), nn.CrossEntropyLoss(weight=torch.arange(1.0, 5.0, dtype=torch.float64))
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        with cp.parallelize(model, optimizer, loss, strategy="data(2)", device=device) as step:
            return [step(*samples()[:8]) for _ in range(2)]

    assert train(device) == pytest.approx(train("cpu"), rel=1e-12)


def test_plans_are_measured_on_copies_of_the_model_on_the_device(device):
    model = build()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    with cp.parallelize(
        model, optimizer, F.cross_entropy, strategy="auto", num_measured_plans=1, device=device
    ) as step:
        assert step(*samples()[:8]) > 0


@pytest.mark.slow
def test_a_model_on_the_device_is_profiled():
    assert cp.profile(build().to(DEVICE.device), samples()[:4][0].to(DEVICE.device)).layers
