"""One rank of one contender's run: trains on workloads in turn, and prints seconds, losses and memory as JSON.

Arguments: contender, workloads in order, ``quick`` for a few steps only. The memory of the first workload is its own;
later ones reuse what the allocator has kept.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import counterpoint as cp

sys.path.append(str(Path(__file__).parents[1] / "data-parallel"))

from contenders import SingleProcess, local_shard, rank_from_env
from ranks import MemorySampler
from workloads import RANKS, WORKLOADS, batches, build_model

WARM_UP, QUICK_STEPS = 3, 2
STEPS = {"A": 8, "B": 4, "C": 16}
MIN_NUM_PARAMS = 1_000_000
OURS = {
    "data": {"strategy": "data(2)"},
    "zero1": {"strategy": "zero(2, level=1)"},
    "zero2": {"strategy": "zero(2, level=2)"},
    "zero3": {"strategy": "zero(2, level=3)"},
    "units": {"strategy": f"zero(2, level=3, min_num_params={MIN_NUM_PARAMS})"},
}


class Counterpoint:
    """A plan of this library."""

    def __init__(self, workload, options):
        self.run = cp.parallelize(build_model(workload), workload.optimizer, workload.loss, **options)

    def step(self, batch):
        return self.run(*batch)

    def mean_loss(self, loss):
        return loss

    def close(self):
        self.run.close()


class Peer(SingleProcess):
    """A plain loop around a wrapped model on gloo, on this rank's half of the batch."""

    def local_part(self, batch):
        return local_shard(batch, dist.get_rank())

    def mean_loss(self, loss):
        total = torch.tensor(loss)
        dist.all_reduce(total)
        return total.item() / RANKS


class ZeroRedundancy(Peer):
    """DistributedDataParallel with a ZeroRedundancyOptimizer: optimizer states are sharded, as at level 1."""

    def wrap_model(self, model):
        return nn.parallel.DistributedDataParallel(model)

    def wrap_optimizer(self, optimizer):
        made = self.workload.optimizer
        return ZeroRedundancyOptimizer(self.model.parameters(), optimizer_class=made.func, **made.keywords)


class FSDP2(Peer):
    """fully_shard of every linear layer with the norm after it, or of every block of the GPT, and of the rest."""

    min_num_params = 0

    def wrap_model(self, model):
        mesh = init_device_mesh("cpu", (RANKS,))
        for unit in merge_units(find_units(model), self.min_num_params):
            fully_shard(unit, mesh=mesh)
        return fully_shard(model, mesh=mesh)


class MergedFSDP2(FSDP2):
    """fully_shard of several of them at once, until they have so many parameters as units of ours."""

    min_num_params = MIN_NUM_PARAMS


class DeepSpeed(Peer):
    """DeepSpeed's engine at a stage of ZeRO, with its defaults."""

    def __init__(self, workload, stage):
        import deepspeed

        self.workload = workload
        model = build_model(workload)
        config = {  # its default clips by norm, which would change the training
            "train_micro_batch_size_per_gpu": workload.size // RANKS,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
        }
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=workload.optimizer(model.parameters()), config=config
        )

    def step(self, batch):
        inputs, targets = self.local_part(batch)
        loss = self.workload.loss(self.engine(inputs), targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()


def find_units(model):
    """Return the parts of a model that FSDP2 gathers at once, besides the rest."""
    if not isinstance(model, nn.Sequential):
        return [[block] for block in model.blocks]
    if any(isinstance(module, nn.LayerNorm) for module in model):
        return [list(pair) for pair in zip(model[::2], model[1::2], strict=True)]
    return [[module] for module in model if isinstance(module, nn.Linear)]


def merge_units(units, min_num_params):
    """Return lists of modules, each with the following ones until they have so many parameters."""
    merged, num_params = [], min_num_params
    for unit in units:
        if num_params < min_num_params:
            merged[-1].extend(unit)
        else:
            merged.append([*unit])
            num_params = 0
        num_params += sum(param.numel() for module in unit for param in module.parameters())
    return merged


def open_group(name):
    """Join the peers' process group, if the contender is a peer; what it imports counts as no growth of memory."""
    if name.startswith("deepspeed"):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        deepspeed.init_distributed("gloo")
    elif name not in OURS:
        dist.init_process_group("gloo")


def build_contender(name, workload):
    if name in OURS:
        return Counterpoint(workload, OURS[name])
    if name.startswith("deepspeed"):
        return DeepSpeed(workload, int(name.removeprefix("deepspeed")))
    return {"zero_redundancy": ZeroRedundancy, "fsdp2": FSDP2, "merged_fsdp2": MergedFSDP2}[name](workload)


def train(name, letter, num_steps):
    """Return the seconds of the steps after warm-up, the losses, and samples of memory until the end of warm-up."""
    workload, memory = WORKLOADS[letter], MemorySampler()
    given = batches(workload, WARM_UP + num_steps)
    memory.sample()
    with memory.sampling():
        side = build_contender(name, workload)
        losses = [side.step(batch) for batch in given[:WARM_UP]]
    seconds = []
    for batch in given[WARM_UP:]:
        began = time.perf_counter()
        losses.append(side.step(batch))
        seconds.append(time.perf_counter() - began)
    means = [side.mean_loss(loss) for loss in losses]
    side.close()
    return {"seconds": seconds, "losses": means, "bytes": memory.samples}


def main(name, letters, extent):
    """Run one rank."""
    torch.set_num_threads(1)
    open_group(name)
    found = {letter: train(name, letter, QUICK_STEPS if extent == "quick" else STEPS[letter]) for letter in letters}
    sys.stdout.write(f"{json.dumps({'rank': rank_from_env(), 'workloads': found})}\n")
    sys.stdout.flush()
    if name not in OURS:
        dist.destroy_process_group()
        os._exit(0)  # threads of FSDP2's mesh abort the process where the interpreter ends


if __name__ == "__main__":
    main(*sys.argv[1:])
