"""What goes wrong between ranks of Horovod's programs, as scenes; each leaves its fabric unusable."""

import os

import torch
from torch import nn

import counterpoint.compat.horovod.torch as hvd
from counterpoint.compat.horovod.world import current_world


def other_names():
    hvd.allreduce(torch.ones(2), name=f"loss of rank {hvd.rank()}")


def other_shapes():
    hvd.allgather(torch.ones(2, 3 + hvd.rank()), name="rows")


def other_models():
    layers = [nn.Linear(2, 2) for _ in range(1 + hvd.rank())]
    model = nn.Sequential(*layers)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def another_order():
    names = ["left", "right"] if hvd.rank() == 0 else ["right", "left"]
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model["right"](model["left"](torch.ones(1, 2))).sum().backward()
    optimizer.step()


def other_sets():
    hvd.add_process_set([hvd.rank()])


def gathers_after_another_has_joined():
    if hvd.rank() == 1:
        hvd.join()
    hvd.allgather(torch.ones(1), name="rows")


def asks_for_what_never_comes():
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="loss")
        while not hvd.poll(handle):
            pass
    else:
        fabric = current_world().fabric
        fabric.timeout_s = 20.0
        fabric.recv(0, "what never comes, either")


def is_gone():
    if hvd.rank() == 1:
        os._exit(3)
    hvd.allreduce(torch.ones(1))
