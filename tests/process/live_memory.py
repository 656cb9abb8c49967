"""What of a process's memory is live between two steps: the storages of all its tensors."""

import gc
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from counterpoint.compiler.compile import storage_size_fn
from counterpoint.fabric.gloo.ops import ScratchPool
from counterpoint.launchers.environment import detect
from counterpoint.plan.plan import Plan
from counterpoint.program.instruction import Forward
from counterpoint.simulator.memory import memory_timeline
from counterpoint.training.between_steps.stale_weights import (
    StaleTensor,
    WithoutOwnGrad,
    get_own_grad,
    without_stale_reads,
)
from counterpoint.training.distributed_world import open_world

WIDTH, NUM_LAYERS = 512, 8
MODEL_BYTES = 4 * NUM_LAYERS * (WIDTH + 1) * WIDTH


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def live_bytes(released=()):
    """Return the bytes of all storages that a tensor of this process refers to, also one whose values are stale.

    Args:
        released: tensors whose memory was never written to.
    """
    gc.collect()
    without_pages = {id(one) for one in released}
    kinds = (StaleTensor, WithoutOwnGrad)
    found = [
        one
        for one in gc.get_objects()
        if (type(one) in {torch.Tensor, nn.Parameter} or issubclass(type(one), kinds)) and id(one) not in without_pages
    ]
    with without_stale_reads():
        tensors = [one for one in found if one.layout == torch.strided and one.is_cpu]
        grads = [grad for one in tensors if one.is_leaf and (grad := get_own_grad(one)) is not None]
        storages = [one.untyped_storage() for one in (*tensors, *grads)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(plans, transport, precision=None, folder=None, passes=("offload:state=disk",)):
    """Return for each plan what is live between two steps, and what gloo's pool has, in sizes of the model.

    Args:
        plans: texts.
        transport: of the ranks.
        precision: what the model computes in.
        folder: of what is offloaded to disk; None to keep all in memory.
        passes: what is offloaded.
    """
    detected = detect()
    assert detected is not None, "a launcher has started the ranks"
    environment = replace(detected, transport=transport)
    return [measure_plan(plan, environment, precision, folder, passes) for plan in plans]


def measure_plan(plan, environment, precision, folder, passes):
    world = open_world(environment, environment.world_size, 60.0)
    pool = getattr(world.fabrics[0], "scratch_pool", ScratchPool())
    before = live_bytes() - pool.num_bytes
    optimizer = torch.optim.Adam((model := make_model()).parameters())
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    step = cp.parallelize(
        model,
        optimizer,
        F.mse_loss,
        strategy=plan,
        share_params_on_host=False,
        environment=environment,
        precision=precision,
        passes=("overlap", *(() if folder is None else passes)),
        offload_folder=folder,
    )
    with step:
        for _ in range(3):
            step(x, y)
        pooled = pool.num_bytes
        released = step.local_ranks.released_params
        live = live_bytes([one for name, one in released.params.items() if released.is_released(name)])
        live -= pooled + before
        step(x, y)
    return [live / MODEL_BYTES, pooled / MODEL_BYTES]


NUM_ROWS = 4096
"""So many that activations are much larger than weights."""


def measure_activations(plan, passes, folder=None):
    """Return for each tuple of passes what is live during the last forward, and what is predicted, in inputs of blocks.

    Args:
        plan: text.
        passes: of each measurement.
        folder: of activations on disk.
    """
    return [measure_at_loss(replace(Plan.parse(plan), passes=tuple(one)), folder) for one in passes]


def measure_at_loss(plan, folder):
    found = []

    def loss(output, target):
        found.append(live_bytes())
        return F.mse_loss(output, target)

    torch.manual_seed(0)
    width = 64
    model = nn.Sequential(*(layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(width, width), nn.GELU())))
    x, y = torch.randn(NUM_ROWS, width), torch.randn(NUM_ROWS, width)
    options = {"strategy": plan, "environment": detect(), "offload_folder": folder}
    with cp.parallelize(model, torch.optim.SGD(model.parameters()), loss, **options) as step:
        before = live_bytes()
        step(x, y)
        step(x, y)
        compiled = step.local_ranks.compiled
        assert compiled is not None, "it has run"
    instructions = compiled.program.unroll(1)[0]
    last = max(index for index, one in enumerate(instructions) if isinstance(one, Forward))
    predicted = memory_timeline(compiled.program, storage_size_fn(compiled.model, NUM_ROWS))[0][last + 1]
    return [(found[-1] - before) / (4 * NUM_ROWS * width), predicted / (4 * NUM_ROWS * width)]


def measure_weights(passes, folder):
    """Return for each tuple of passes what is live during the loss, and what is predicted, in shards of blocks.

    Args:
        passes: of each measurement.
        folder: of weights on disk.
    """
    return [measure_weights_at_loss(tuple(one), folder) for one in passes]


def measure_weights_at_loss(passes, folder):
    found = []

    def loss(output, target):
        found.extend([live_bytes()] if is_measuring else [])
        return F.mse_loss(output, target)

    before, is_measuring = live_bytes(), False
    model = make_model()
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    options = {"strategy": "zero(2, level=3)", "environment": detect(), "offload_folder": folder, "passes": passes}
    with cp.parallelize(model, torch.optim.SGD(model.parameters()), loss, **options) as step:
        step(x, y)
        is_measuring = True
        step(x, y)
        compiled = step.local_ranks.compiled
        assert compiled is not None, "it has run"
    instructions = compiled.program.unroll(1)[0]
    last = max(index for index, one in enumerate(instructions) if isinstance(one, Forward))
    predicted = memory_timeline(compiled.program, storage_size_fn(compiled.model, 4))[0][last + 1]
    shard = MODEL_BYTES / NUM_LAYERS / 2
    return [(found[-1] - before) / shard, predicted / shard]


class WideBlock(nn.Module):
    """Two layers, of which the inner one has most of the activations."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def make_wide_blocks():
    """Return a model in float64, and a batch whose activations are much larger than its weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(WideBlock(32) for _ in range(6))).double()
    return model, torch.randn(NUM_ROWS, 32).double(), torch.randn(NUM_ROWS, 32).double()


def train_wide_blocks(plan, passes):
    """Return for each tuple of passes the bytes that a step adds up to the loss, and the losses of three steps.

    Args:
        plan: text.
        passes: of each run.
    """
    return [train_with_passes(plan, tuple(one)) for one in passes]


def train_with_passes(plan, passes):
    found = []

    def loss(output, target):
        found.append(live_bytes())
        return F.mse_loss(output, target)

    model, x, y = make_wide_blocks()
    full_plan, optimizer = replace(Plan.parse(plan), passes=passes), torch.optim.SGD(model.parameters(), lr=0.5)
    with cp.parallelize(model, optimizer, loss, strategy=full_plan, environment=detect()) as step:
        before = live_bytes()
        losses = [float(step(x, y)) for _ in range(3)]
    return [found[0] - before, losses]
