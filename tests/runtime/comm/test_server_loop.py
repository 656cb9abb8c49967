"""A server with workers of random speeds: the staleness bound holds, and the push log reproduces the weights."""

import copy
import random
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import optim

from counterpoint.errors import ProtocolError
from counterpoint.fabric.fabric import Fabric
from counterpoint.fabric.local import LocalWorld
from counterpoint.program.instruction import ApplyPushes
from counterpoint.program.text import format_unit, parse_tensor_ref
from counterpoint.runtime.comm.server_loop import ParameterServerLoop
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.runtime.params.param_store import ParamStore
from counterpoint.testing.parity_models import make_parity_model, plan_for
from counterpoint.training.options import TrainingOptions
from counterpoint.training.ranks.local_ranks import LocalRanks
from tests.references.ssp import ssp

STEPS = 6
SGD = partial(optim.SGD, lr=0.1)


class RandomWorkers:
    """The server's fabric, with workers that push in random order, some more often than others."""

    def __init__(self, model, units, flat_params, parts, seed):
        self.draw, self.parts, self.units, self.flat_params = random.Random(seed), parts, units, flat_params
        self.replicas = {worker: copy.deepcopy(model) for worker in parts}
        self.messages: dict[Any, Any] = {worker: deque() for worker in parts}
        self.missing: dict[Any, Any] = {worker: set() for worker in parts}
        self.done = dict.fromkeys(parts, 0)
        self.leads = []
        for worker in parts:
            self.compute(worker)

    def compute(self, worker):
        """Push a gradient at the worker's current weights, unit by unit."""
        inputs, targets = self.parts[worker][self.done[worker]]
        replica = self.replicas[worker]
        replica.zero_grad()
        F.cross_entropy(replica(inputs), targets).backward()
        named = dict(replica.named_parameters())
        for unit in reversed(list(self.units)):
            flat = torch.cat([named[slot.name].grad.reshape(-1) for slot in self.flat_params[unit].layout.slots])
            self.messages[worker].append((f"push(grad{format_unit(unit)})", [flat]))
        self.missing[worker] = set(self.units)
        self.done[worker] += 1
        self.leads.append(max(self.done.values()) - min(self.done.values()))

    def recv_any(self, workers):
        ready = [worker for worker in workers if self.messages[worker]]
        worker = self.draw.choices(ready, [1 + 20 * one for one in ready])[0]
        return worker, *self.messages[worker].popleft()

    def send(self, worker, label, tensors):
        unit = parse_tensor_ref(label).blocks
        named = dict(self.replicas[worker].named_parameters())
        for slot in self.flat_params[unit].layout.slots:
            named[slot.name].data.copy_(tensors[0][slot.start : slot.stop].view(slot.shape))
        self.missing[worker].discard(unit)
        if not self.missing[worker] and self.done[worker] < STEPS:
            self.compute(worker)


def run_server(seed, num_workers, staleness):
    """Return the workers, the server's interpreter and the expected weights after every worker has run all steps."""
    parity_model, draw = make_parity_model("mlp"), torch.Generator().manual_seed(seed)
    parts = {
        worker: [(torch.randn(4, 8, generator=draw).double(), torch.randint(0, 4, (4,), generator=draw))] * STEPS
        for worker in range(num_workers)
    }
    model, plan = parity_model.build(), plan_for(f"ssp({num_workers}, staleness={staleness})", num_workers)
    world = LocalWorld(plan.num_ranks)
    local_ranks = LocalRanks(
        world, plan, model, parity_model.loss, OptimizerSpec(SGD, dict(model.named_parameters())), TrainingOptions()
    )
    local_ranks.build(SlicedBatch(parity_model.batches[0], ((0, 6),) * 4).inputs(0), 6)
    interpreter = local_ranks.ranks[num_workers].interpreter
    units = interpreter.store.units
    flat_params = {unit: one.flat_params[0] for unit, one in units.items()}
    names = {unit: tuple(one.params) for unit, one in units.items()}
    workers = RandomWorkers(parity_model.build(), names, flat_params, parts, seed)
    server = ParameterServerLoop(interpreter.store, cast("Fabric", workers), interpreter.state.push_log)
    instructions = [
        instruction for instruction in interpreter.program.instructions if isinstance(instruction, ApplyPushes)
    ]
    for _ in range(STEPS):
        server.apply_and_reply(instructions)
    world.close()
    expected = ssp(parity_model.build(), units=names, parts=parts, loss=F.cross_entropy, optimizer=SGD,
                   journals=[[(one.unit, one.worker) for one in interpreter.state.push_log]],
                   staleness=staleness)  # fmt: skip
    return workers, interpreter, expected


@pytest.mark.long(quick=["2-0"])
@pytest.mark.parametrize(("num_workers", "staleness"), [(2, 0), (2, 2), (3, 1), (4, 3)])
def test_workers_of_all_speeds_keep_the_bound_and_replay_bit_for_bit(num_workers, staleness):
    for seed in range(8):
        workers, interpreter, (model, oldest) = run_server(seed, num_workers, staleness)
        params = interpreter.store.params
        assert all(torch.equal(params[name].detach(), value) for name, value in model.named_parameters())
        assert max(workers.leads) == staleness + 1
        assert oldest <= (num_workers - 1) * (2 * staleness + 1)


class ImpatientWorker:
    """The server's fabric, with a worker that pushes without waiting for replies."""

    def __init__(self):
        self.num_replies = 0

    def recv_any(self, workers):
        return workers[0], "push(grad0)", []

    def send(self, worker, label, tensors):
        self.num_replies += 1


def test_a_push_from_too_far_ahead_is_an_error():
    worker, store = (
        ImpatientWorker(),
        cast("ParamStore", SimpleNamespace(units={(0,): SimpleNamespace(flat_params=[])})),
    )
    server = ParameterServerLoop(store, cast("Fabric", worker), [])
    with pytest.raises(ProtocolError, match=r"staleness: push 3 of rank 0 to unit 0, .* and rank 1 has pushed 0 times"):
        server.apply_and_reply([ApplyPushes(((0,),), (0, 1), 1)] * 2)
    assert worker.num_replies == 1
    server.clear()
    assert [server.pushes[0,].tracker.clocks, server.pushes[0,].waiting] == [{"rank 0": 0, "rank 1": 0}, []]
