"""A server whose workers are of all speeds, drawn from a seed: who may run how far ahead, and what comes of it."""

import copy
import random
from collections import deque
from functools import partial
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
from counterpoint.runtime.comm.server_loop import ParameterServerLoop, require_within_staleness
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.testing.parity_models import make_parity_model, plan_for
from counterpoint.training.local_ranks import LocalRanks
from counterpoint.training.options import TrainingOptions
from tests.references.ssp import ssp

STEPS = 6
SGD = partial(optim.SGD, lr=0.1)


class RandomWorkers:
    """Workers that are chosen by lot, some more often than others; to the server it is the way to them."""

    def __init__(self, model, units, arenas, parts, seed):
        self.draw, self.parts, self.units, self.arenas = random.Random(seed), parts, units, arenas
        self.replicas = {worker: copy.deepcopy(model) for worker in parts}
        self.messages: dict[Any, Any] = {worker: deque() for worker in parts}
        self.missing: dict[Any, Any] = {worker: set() for worker in parts}
        self.done = dict.fromkeys(parts, 0)
        self.leads = []
        for worker in parts:
            self.compute(worker)

    def compute(self, worker):
        """Push a gradient at what the worker has got, unit by unit."""
        inputs, targets = self.parts[worker][self.done[worker]]
        replica = self.replicas[worker]
        replica.zero_grad()
        F.cross_entropy(replica(inputs), targets).backward()
        named = dict(replica.named_parameters())
        for unit in reversed(list(self.units)):
            flat = torch.cat([named[slot.name].grad.reshape(-1) for slot in self.arenas[unit].layout.slots])
            self.messages[worker].append((f"push(grad{format_unit(unit)})", [flat]))
        self.missing[worker] = set(self.units)
        self.done[worker] += 1
        self.leads.append(max(self.done.values()) - min(self.done.values()))

    def recv_any(self, workers):
        able = [worker for worker in workers if self.messages[worker]]
        worker = self.draw.choices(able, [1 + 20 * one for one in able])[0]
        return worker, *self.messages[worker].popleft()

    def send(self, worker, label, tensors):
        unit = parse_tensor_ref(label).blocks
        named = dict(self.replicas[worker].named_parameters())
        for slot in self.arenas[unit].layout.slots:
            named[slot.name].data.copy_(tensors[0][slot.start : slot.stop].view(slot.shape))
        self.missing[worker].discard(unit)
        if not self.missing[worker] and self.done[worker] < STEPS:
            self.compute(worker)


def run_server(seed, num_workers, staleness):
    """The crowd, the server's journal and weights after all have pushed as often as there are steps."""
    trained, draw = make_parity_model("mlp"), torch.Generator().manual_seed(seed)
    parts = {
        worker: [(torch.randn(4, 8, generator=draw).double(), torch.randint(0, 4, (4,), generator=draw))] * STEPS
        for worker in range(num_workers)
    }
    model, plan = trained.build(), plan_for(f"ssp({num_workers}, staleness={staleness})", num_workers)
    world = LocalWorld(plan.num_ranks)
    team = LocalRanks(
        world, plan, model, trained.loss, OptimizerSpec(SGD, dict(model.named_parameters())), TrainingOptions()
    )
    team.build(SlicedBatch(trained.batches[0], ((0, 6),) * 4).inputs(0), 6)
    interpreter = team.ranks[num_workers].interpreter
    units = interpreter.store.units
    arenas = {unit: one.flat_params[0] for unit, one in units.items()}
    names = {unit: tuple(one.params) for unit, one in units.items()}
    crowd = RandomWorkers(trained.build(), names, arenas, parts, seed)
    counter = ParameterServerLoop(interpreter.store, cast("Fabric", crowd), interpreter.state.push_log)
    words = [word for word in interpreter.program.instructions if isinstance(word, ApplyPushes)]
    for _ in range(STEPS):
        counter.apply_and_reply(words)
    world.close()
    expected = ssp(trained.build(), units=names, parts=parts, loss=F.cross_entropy, optimizer=SGD,
                   journals=[[(one.unit, one.worker) for one in interpreter.state.push_log]],
                   staleness=staleness)  # fmt: skip
    return crowd, interpreter, expected


@pytest.mark.parametrize(("num_workers", "staleness"), [(2, 0), (2, 2), (3, 1), (4, 3)])
def test_workers_of_all_speeds_keep_the_bound_and_play_back_bit_for_bit(num_workers, staleness):
    for seed in range(8):
        crowd, interpreter, (model, oldest) = run_server(seed, num_workers, staleness)
        params = interpreter.store.params
        assert all(torch.equal(params[name].detach(), value) for name, value in model.named_parameters())
        assert max(crowd.leads) == staleness + 1
        assert oldest <= (num_workers - 1) * (2 * staleness + 1)


def test_a_push_from_further_ahead_changes_nothing():
    word = ApplyPushes(((0,),), (0, 1), 1)
    require_within_staleness(word, ((0,), 0), {0: 3, 1: 2})
    with pytest.raises(
        ProtocolError, match="push 4 of unit 0 has come from rank 0, while rank 1 has pushed it 1 times"
    ):
        require_within_staleness(word, ((0,), 0), {0: 3, 1: 1})
