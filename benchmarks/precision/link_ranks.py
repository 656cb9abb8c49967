"""One rank: alternating steps of every contender; each rank prints its results as JSON."""

import json
import sys
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from wide_products import find_slow_dtypes, replace_products

import counterpoint as cp
from counterpoint.jobs.job import sequence_loss
from counterpoint.jobs.models import GPT, GPTShape
from counterpoint.launchers.environment import detect

BATCH, TOKENS, LENGTH, WARM_UP, TRIALS = 8, 4096, 128, 3, 52  # of bucket sizes
OURS = {
    "data": {"strategy": "data(2)", "precision": "bf16(reduce=bf16)"},
    "zero3": {"strategy": "zero(2, level=3)", "precision": "bf16(reduce=bf16)"},
    "prefetch": {
        "strategy": "zero(2, level=3, reshard_after_forward=off)",
        "precision": "bf16(reduce=bf16)",
        "passes": ("overlap", "prefetch"),
    },
    "float32": {"strategy": "data(2)"},
}


def gpt():
    torch.manual_seed(0)
    return GPT(GPTShape(num_layers=6, width=256, head_dim=64, context=LENGTH, num_tokens=TOKENS, dropout=0.0))


def adamw(params):
    return optim.AdamW(params, lr=3e-4)


class Peer:
    """A plain loop around a wrapped model, on this rank's part of the batch."""

    def __init__(self):
        self.model = self.wrap(gpt())
        self.optimizer = adamw(self.model.parameters())

    def __call__(self, inputs, targets):
        rank, count = dist.get_rank(), len(inputs) // dist.get_world_size()
        own = slice(rank * count, (rank + 1) * count)
        self.optimizer.zero_grad()
        loss = self.loss(inputs[own], targets[own])
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def close(self):
        pass


def hook_on_gloo(state, bucket):
    """torch's own hook under another name: by its name it is refused without NCCL, but gloo sums bf16, too."""
    return bf16_compress_hook(state, bucket)


class DDP(Peer):
    """DistributedDataParallel on gloo with its bf16 hook; the model computes in an autocast."""

    def wrap(self, model):
        model = nn.parallel.DistributedDataParallel(model)
        model.register_comm_hook(None, hook_on_gloo)
        return model

    def loss(self, inputs, targets):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = self.model(inputs)
        return sequence_loss(outputs.float(), targets)


class FSDP2(Peer):
    """fully_shard of every block on gloo, weights gathered and gradients reduced in bf16."""

    def wrap(self, model):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)

    def loss(self, inputs, targets):
        return sequence_loss(self.model(inputs).float(), targets)


def time_step(step, batch):
    """Return the seconds of a step that all ranks start at the same time, and its mean loss."""
    dist.barrier()
    began = time.perf_counter()
    loss = step(*batch)
    seconds = time.perf_counter() - began
    total = torch.tensor(loss)
    dist.all_reduce(total)
    return seconds, float(total) / dist.get_world_size()


def main(rounds, *, is_quick):
    """Run one rank."""
    torch.set_num_threads(1)
    torch.backends.cuda.enable_flash_sdp(False)  # attention is made of products, which may be replaced
    slow = find_slow_dtypes()
    library = replace_products(slow)
    dist.init_process_group("gloo")
    environment = detect()
    environment = replace(environment, master_port=environment.master_port + 1)
    drawn = torch.randint(0, TOKENS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    batch = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    sides = {
        name: cp.parallelize(gpt(), adamw, sequence_loss, environment=environment, **options)
        for name, options in OURS.items()
    }
    sides.update(ddp=DDP(), fsdp2=FSDP2())
    losses = {name: [time_step(step, batch)[1] for _ in range(WARM_UP)] for name, step in sides.items()}
    for step in () if is_quick else sides.values():
        for _ in range(TRIALS - WARM_UP if hasattr(step, "local_ranks") else 0):
            step(*batch)
    seconds = {name: [] for name in sides}
    for _ in range(rounds):
        for name, step in sides.items():
            seconds[name].append(time_step(step, batch)[0])
    print(
        json.dumps({"seconds": seconds, "losses": losses, "replaced_products": sorted(map(str, slow))}),
        flush=True,
    )
    for step in sides.values():
        step.close()
    dist.destroy_process_group()
    del library  # kept until here


if __name__ == "__main__":
    main(int(sys.argv[1]), is_quick=sys.argv[2] == "quick")
