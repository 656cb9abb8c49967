"""Optimizer state of the stand-in device in host memory, and on disk: the update runs on the host, with its numbers."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import counterpoint as cp
from counterpoint.testing.parity_models import ADAMW, make_parity_model, plan_for
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.training.ranks import run_compiler
from tests.covering import each_value_once
from tests.training.trainers import max_difference, mlp

PLANS = ["solo", "data(2)", "zero(2, level=1)", "zero(2, level=2)", "zero(2, level=3)", "pipeline(2)", "tensor(2)"]
MASTERS = "bf16(reduce=bf16, weights=compute)"


@pytest.fixture(name="small_chunks", autouse=True)
def use_small_chunks(monkeypatch):
    monkeypatch.setattr(run_compiler, "OFFLOAD_CHUNK_BYTES", 512)


def train(name, strategy, place="", folder=None, **options):
    """Return losses and parameters of a few steps, on the device if its state is offloaded, else on the host."""
    parity, plan = make_parity_model(name), plan_for(strategy, 4)
    options |= {"device": StandInAccelerator(), "offload_folder": folder} if place else {}
    passes = ("overlap", *([f"offload:state={place}"] if place else []))
    model, settings = parity.build(), {"batch_norm": "microbatch", "seed": 3, **options}
    optimizer = ADAMW(model.parameters())
    with cp.parallelize(model, optimizer, parity.loss, strategy=replace(plan, passes=passes), **settings) as step:
        losses = [float(step(inputs, targets)) for inputs, targets in parity.batches]
        step.export_weights()
        states = optimizer.state_dict()["state"]
    return losses, {key: value.detach().cpu() for key, value in model.named_parameters()}, states


@pytest.mark.long(quick=["host-mlp-solo", "host-gpt-zero(2, level=3)", "disk-mlp-zero(2, level=1)"])
@pytest.mark.parametrize(("name", "strategy"), each_value_once(["mlp", "gpt"], PLANS))
@pytest.mark.parametrize("place", ["host", "disk"])
def test_losses_weights_and_states_are_those_of_the_host(place, name, strategy, tmp_path):
    losses, params, states = train(name, strategy)
    found_losses, found, found_states = train(name, strategy, place, tmp_path)
    assert found_losses == pytest.approx(losses, rel=1e-12)
    assert max_difference(found, params) <= 1e-12
    for number, state in states.items():
        moved = {key: value.cpu() for key, value in found_states[number].items()}
        assert max_difference(moved, state) <= 1e-9  # small moments, of gradients that differ by rounding


def masters_on(device, place, folder):
    torch.manual_seed(0)
    model, draw = mlp().float(), torch.Generator().manual_seed(1)
    options = {"passes": ("overlap", f"offload:state={place}"), "offload_folder": folder} if place else {}
    options |= {"strategy": "zero(2, level=2)", "precision": MASTERS, "device": device}
    with cp.parallelize(model, ADAMW(model.parameters()), F.mse_loss, **options) as step:
        for _ in range(5):
            step(torch.randn(8, 6, generator=draw), torch.randn(8, 3, generator=draw))
        step.export_weights()
    return {key: value.detach().cpu() for key, value in model.named_parameters()}


@pytest.mark.parametrize("place", ["host", "disk"])
def test_master_weights_stay_off_the_device(place, tmp_path):
    found = masters_on(StandInAccelerator(), place, tmp_path)
    assert max_difference(found, masters_on("cpu", "", None)) <= 1e-6


def count_states(device, passes):
    """Return how many tensors of state are on the device and on the host."""
    model = mlp()
    optimizer = ADAMW(model.parameters())
    with cp.parallelize(model, optimizer, F.mse_loss, strategy="solo", passes=passes, device=device) as step:
        step(torch.ones(4, 6, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64))
        (rank,) = step.local_ranks.ranks.values()
        optimizers = [one for one, _ in rank.interpreter.store.optimizers.values() if one is not None]
        states = [value for one in optimizers for own in one.state.values() for value in own.values()]
        return {
            kind: sum(value.device.type == kind and value.numel() > 1 for value in states)
            for kind in ("cpu", "stand_in")
        }


def test_state_is_in_host_memory_instead_of_the_devices():
    device = StandInAccelerator()
    assert count_states(device, ("overlap",))["cpu"] == 0
    moved = count_states(device, ("overlap", "offload:state=host"))
    assert moved["cpu"] > 0
    assert moved["stand_in"] == 0


def test_on_the_host_it_changes_nothing_and_says_so():
    with pytest.warns(UserWarning, match="offload:state=host changes nothing: ranks compute on the host"):
        assert count_states("cpu", ("overlap", "offload:state=host"))["cpu"] > 0
