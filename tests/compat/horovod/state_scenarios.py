"""Objects and states that travel, batch normalization, ranks that run out of data, and the timeline: as scenes."""

import json
import logging
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import counterpoint.compat.horovod.torch as hvd
from counterpoint.compat.horovod import join as joining
from counterpoint.compat.horovod.world import current_world
from tests.compat.horovod.rank_runner import run_scenario
from tests.compat.horovod.training_scenarios import WIDE, Net, loss_of, sgd, values

LENGTHS, CHANNELS = (3, 1, 4), 3


def objects():
    """What comes back is equal and of the same types, on all ranks."""
    given = {
        "epoch": 3, 7: (1.5, None, [True]), "text": "ü", "raw": b"\x00\xff", "set": {1, 2}, "kind": torch.float16,
        "array": np.arange(6).reshape(2, 3), "number": np.float32(0.5), "none": torch.empty(0, 2),
        "half": torch.ones(2, 2).bfloat16(), "strided": torch.arange(6).view(2, 3).T, "flag": torch.tensor(True),
    }  # fmt: skip
    result = hvd.broadcast_object(given if hvd.rank() == 1 else None, root_rank=1)
    same = [repr(result[key]) == repr(value) and type(result[key]) is type(value) for key, value in given.items()]
    return [list(result) == list(given), same, hvd.allgather_object({"rank": hvd.rank()})]


def foreign_objects():
    """Objects that cannot be pickled are refused on every rank, and the next call works."""
    hidden = {"model": [nn.Linear(1, 1)]} if hvd.rank() == 0 else {}
    texts = [run_scenario(lambda: hvd.broadcast_object(hidden)), run_scenario(lambda: hvd.allgather_object(hidden))]
    return [*texts, hvd.broadcast_object(5)]


def states():
    """Rank 1 has trained; the others start from where it is, and no step is taken for it."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (hvd.rank() + 1), betas=(0.5, 0.5))
    for _ in range(2 if hvd.rank() == 1 else 0):
        loss_of(model, 0, 0).backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    before = values(model)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    state = optimizer.state_dict()
    means = torch.cat([entry["exp_avg"].flatten() for _, entry in sorted(state["state"].items())])
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    facts = [state["param_groups"][0]["lr"], state["param_groups"][0]["betas"], float(state["state"][0]["step"])]
    return [*facts, means, before == values(model), before]


def samples(rank):
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(LENGTHS[rank], CHANNELS, 2, 2, generator=draw, dtype=WIDE) * (rank + 1) + rank


def normalized():
    """Batches of other sizes on every rank, through a layer with and one without weights."""
    return [normalize(hvd.SyncBatchNorm, samples(hvd.rank()), affine) for affine in (True, False)]


def normalize(kind, x, affine):
    layer = kind(CHANNELS, momentum=0.3 if affine else None, affine=affine).to(WIDE)
    if affine:
        nn.init.uniform_(layer.weight, generator=torch.Generator().manual_seed(5))
    x = x.clone().requires_grad_()
    for _ in range(2):
        y = layer(x)
    (y * torch.sin(3 * x.detach())).sum().backward()
    layer.eval()
    params = [param.grad for param in layer.parameters()]
    return [y.detach(), x.grad, layer.running_mean, layer.running_var, layer(x).detach(), *params]


def uneven():
    """Ranks run out of data one after the other, in two epochs; rank 0 has nothing in the first."""
    model, result = Net(), []
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    for epoch, num_batches in enumerate([2 * hvd.rank(), 3 * hvd.size() - hvd.rank()]):
        for step in range(num_batches):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), 10 * epoch + step).backward()
            optimizer.step()
            hvd.allreduce(torch.ones(2), op=hvd.Product)
        result.append(hvd.join())
        hvd.broadcast_parameters(model.state_dict(), root_rank=result[-1])
        hvd.broadcast_optimizer_state(optimizer, root_rank=result[-1])
    return [*result, values(model), hvd.allreduce(torch.ones(1), op=hvd.Sum)]


def zeros_of_joined_ranks():
    """What is left of each reduction when rank 0 has nothing: a mean still divides by the number of all ranks."""
    result = []
    if hvd.rank() != 0:
        ops = [hvd.Sum, hvd.Average, hvd.Max, hvd.Product, hvd.Adasum]
        result = [hvd.allreduce(torch.ones(1, dtype=WIDE), op=op) for op in ops]
        result += hvd.grouped_allreduce([torch.ones(1), torch.ones(1, dtype=torch.int32)], op=hvd.Sum)
        handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
        while not hvd.poll(handle):
            pass
        result.append(hvd.synchronize(handle))
        hvd.barrier()
    hvd.join()
    return [float(each) for each in result]


def written_timeline():
    """Return phases and tensors of what rank 0 has written, and whether no other rank has written one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "timeline.json")
        hvd.start_timeline(str(path), mark_cycles=True)
        hvd.allreduce(torch.ones(2), name="loss")
        hvd.broadcast(torch.ones(2), 0, name="weight")
        hvd.stop_timeline()
        if not path.exists():
            return []
        events = json.loads(path.read_text(encoding="utf-8"))
        tracks = [event["args"]["name"] for event in events if event.get("name") == "thread_name"]
        return [tracks, [event["name"] for event in events if event.get("ph") == "X"]]


def stalled():
    """Return what rank 0 logs while rank 1 does not come, until it does."""
    kv_store, result = current_world().join_state.open_store(), []
    assert kv_store is not None
    listener = logging.Handler()
    listener.emit = lambda record: result.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("counterpoint.horovod").addHandler(listener)
    joining.STALL_WARNING_S = 0.05  # type: ignore[misc]  # of this rank's process only
    while hvd.rank() != 0 and kv_store.get("stalled/0") is None:
        pass
    hvd.allreduce(torch.ones(1), name="loss")
    return [*result, kv_store.get("stalled/0")] if hvd.rank() == 0 else []


def begun_again():
    """Return what is known before and after a shutdown and a second start."""
    before = hvd.rank()
    hvd.shutdown()
    hvd.shutdown()
    closed = [hvd.is_initialized(), run_scenario(hvd.size), hvd.global_process_set.included()]
    hvd.init(process_sets=[hvd.ProcessSet([0])])
    hvd.init()
    return [hvd.rank() == before, *closed, hvd.add_process_set([1]).process_set_id, hvd.allreduce(torch.ones(1))]


SCENARIOS = (
    objects, foreign_objects, states, normalized, uneven, zeros_of_joined_ranks, written_timeline, stalled,
    begun_again,
)  # fmt: skip
