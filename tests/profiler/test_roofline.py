"""Profiles of models that are not run, at the roofline of a device."""

from dataclasses import replace

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import counterpoint as cp
from counterpoint.errors import PlanError
from counterpoint.jobs.models import GPT, GPTShape
from counterpoint.model.precision import parse_precision
from counterpoint.partitioning.flop_counter import FlopCounter
from counterpoint.training.profiling import profile
from counterpoint.world.cluster import Device, Roofline

IN, OUT, ROWS = 256, 512, 1024
SHAPE = GPTShape(num_layers=2, width=64, head_dim=16, context=32, num_tokens=64)
PEAKS = Roofline("card", (("fp32", 1e12), ("tf32", 4e12), ("bf16", 16e12)))
CARD = Device(1e12, 2**34, 1e12, 0, replace(PEAKS, launch_s=1e-6))
FAST_MEMORY = replace(CARD, memory_bytes_per_s=1e30, roofline=PEAKS)


def linear_profile(device, precision=None, model=None):
    layer = nn.Linear(IN, OUT, bias=False) if model is None else model
    return profile(
        layer,
        torch.ones(ROWS, IN),
        loss=lambda output, targets: output.mean(),
        roofline_device=device,
        precision=precision,
        microbatch_sizes=[ROWS],
    )


def gpt_profile(torch_device, precision=None, sizes=(2,)):
    with torch.device(torch_device):
        model = GPT(SHAPE)
        tokens = torch.zeros(2, SHAPE.context, dtype=torch.int64)
    return profile(
        model,
        tokens,
        tokens,
        loss=lambda output, targets: F.cross_entropy(output.flatten(0, -2), targets.flatten()),
        optimizer=optim.AdamW,
        roofline_device=CARD,
        precision=precision,
        microbatch_sizes=sizes,
    )


def test_a_linear_layer_takes_the_time_of_its_product_and_of_its_launch():
    """The product is bound by arithmetic; the mean of the output, which is the loss, by memory."""
    forward_s = linear_profile(CARD).batch_sizes[0].unpartitioned.forward_s
    product_s, mean_s = 2 * ROWS * IN * OUT / 1e12, 4 * (ROWS * OUT + 1) / 1e12
    assert forward_s == pytest.approx(product_s + mean_s + 2 * 1e-6, rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "bf16(autocast=true)"])
def test_products_in_bf16_take_the_time_of_their_dtype(precision):
    whole, narrow = (linear_profile(FAST_MEMORY, one).batch_sizes[0].unpartitioned for one in (None, precision))
    assert narrow.forward_s == pytest.approx(whole.forward_s / 16, rel=0.05)
    assert narrow.backward_s == pytest.approx(whole.backward_s / 16, rel=0.1)


def test_a_model_in_bf16_needs_no_precision_to_compute_in_it():
    profiled = profile(
        nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16),
        torch.ones(ROWS, IN, dtype=torch.bfloat16),
        roofline_device=FAST_MEMORY,
        microbatch_sizes=[ROWS],
    )
    assert profiled.batch_sizes[0].unpartitioned.forward_s == pytest.approx(2 * ROWS * IN * OUT / 16e12, rel=0.05)


def test_float32_products_have_the_peak_that_torch_is_set_to(monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    with FlopCounter() as counter:
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert counter.op_costs[-1].dtype == "tf32"
    assert [op.dtype for op in counter.op_costs[:-1]] == ["fp32"] * (len(counter.op_costs) - 1)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_model_without_values_has_the_profile_of_one_with_values(precision):
    """Attention of tensors on ``meta`` was counted as its formula, with scores that GPUs never write to memory."""
    real, meta = (gpt_profile(device, precision).batch_sizes[0] for device in ("cpu", "meta"))
    assert meta.unpartitioned.saved_bytes == pytest.approx(real.unpartitioned.saved_bytes, rel=0.1)
    assert meta.unpartitioned.seconds == pytest.approx(real.unpartitioned.seconds, rel=0.1)


def test_tracing_for_other_microbatches_is_not_counted():
    """The first layer had the operations of a whole forward, which was traced while it was counted."""
    one, two = gpt_profile("cpu", sizes=(1, 2)).batch_sizes
    assert one.layers[0].forward_s <= two.layers[0].forward_s
    assert one.layers[0].saved_bytes == two.layers[0].saved_bytes / 2


def test_casts_of_weights_are_no_activations():
    """They are counted with the weights; a linear layer saves the cast of its input alone."""
    assert linear_profile(CARD, "bf16").batch_sizes[0].unpartitioned.saved_bytes == 2 * ROWS * IN


def test_activations_in_bf16_take_about_half_the_memory():
    whole, narrow = (gpt_profile("cpu", one).batch_sizes[0].unpartitioned for one in (None, "bf16"))
    assert 0.45 < narrow.saved_bytes / whole.saved_bytes < 0.75


def test_a_profile_says_where_its_times_come_from():
    profiled_on = linear_profile("8xh100", "bf16").profiled_on
    assert (profiled_on.device, profiled_on.is_measured, profiled_on.precision) == (
        "NVIDIA H100 SXM 80GB",
        False,
        "bf16",
    )
    assert linear_profile(Device()).profiled_on.device == "counted"


def test_a_precision_is_not_measured():
    with pytest.raises(PlanError, match="profiles are measured in the model's own dtypes; omit it, or give roofline_"):
        cp.profile(nn.Linear(2, 2), torch.ones(4, 2), precision=parse_precision("bf16"))


class Selecting(nn.Linear):
    def forward(self, x):
        return super().forward(x)[x.sum(1).nonzero().flatten()]


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x) * float(x.sum())


@pytest.mark.parametrize(("kind", "operator"), [(Selecting, "aten.nonzero"), (Branching, "aten._local_scalar_dense")])
def test_a_model_that_depends_on_values_has_no_roofline(kind, operator):
    with pytest.raises(PlanError, match=rf"but {operator}.* depends on values, at .*test_roofline.*; profile without"):
        linear_profile(CARD, model=kind(IN, OUT))
