"""The peers, each as its users run it; a side is given its part of every batch, or the whole one."""

import os

import torch
import torch.distributed as dist
from torch import nn
from workloads import RANKS, built

import counterpoint as cp


class Alone:
    """A loop by hand in one process, on the whole batch."""

    def __init__(self, workload):
        self.workload = workload
        self.model = self.wrapped(built(workload))
        self.optimizer = self.made(workload.optimizer(self.model.parameters()))

    def wrapped(self, model):
        return model

    def made(self, optimizer):
        return optimizer

    def part(self, batch):
        return batch

    def step(self, batch):
        inputs, targets = self.part(batch)
        self.optimizer.zero_grad()
        loss = self.workload.loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def mean(self, loss):
        return loss

    def close(self):
        pass


class Half(Alone):
    """A loop by hand in one process, on what its rank gets of the batch: no communication at all."""

    def part(self, batch):
        return own_part(batch, own_rank())


class Ours:
    """The plan that a user gets for strategy="data" on one host."""

    def __init__(self, workload):
        self.run = cp.parallelize(built(workload), workload.optimizer, workload.loss, strategy="data")

    def step(self, batch):
        return self.run(*batch)

    def mean(self, loss):
        return loss

    def close(self):
        self.run.close()


class DDP(Alone):
    """torch's DistributedDataParallel on gloo."""

    def __init__(self, workload):
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        super().__init__(workload)

    def wrapped(self, model):
        return nn.parallel.DistributedDataParallel(model)

    def part(self, batch):
        return own_part(batch, self.rank)

    def mean(self, loss):
        total = torch.tensor(loss)
        dist.all_reduce(total)
        return total.item() / RANKS

    def close(self):
        dist.destroy_process_group()


class Horovod(Alone):
    """Horovod's DistributedOptimizer on gloo."""

    def __init__(self, workload):
        import horovod.torch as hvd

        self.hvd = hvd
        hvd.init()
        self.rank = hvd.rank()
        super().__init__(workload)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def made(self, optimizer):
        return self.hvd.DistributedOptimizer(optimizer, named_parameters=self.model.named_parameters())

    def part(self, batch):
        return own_part(batch, self.rank)

    def mean(self, loss):
        return self.hvd.allreduce(torch.tensor(loss), name="loss").item()

    def close(self):
        self.hvd.shutdown()


class DeepSpeed(Alone):
    """DeepSpeed's engine at ZeRO stage 0."""

    def __init__(self, workload):
        import deepspeed

        deepspeed.init_distributed("gloo")
        self.workload, self.rank = workload, dist.get_rank()
        model = built(workload)
        config = {  # it clips by the norm unless told not to, which would be another training
            "train_micro_batch_size_per_gpu": workload.size // RANKS,
            "zero_optimization": {"stage": 0},
            "gradient_clipping": 0.0,
        }
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=workload.optimizer(model.parameters()), config=config
        )

    def step(self, batch):
        inputs, targets = own_part(batch, self.rank)
        loss = self.workload.loss(self.engine(inputs), targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()

    def mean(self, loss):
        total = torch.tensor(loss)
        dist.all_reduce(total)
        return total.item() / RANKS

    def close(self):
        dist.destroy_process_group()


SIDES = {"ours": Ours, "ddp": DDP, "horovod": Horovod, "deepspeed": DeepSpeed, "half": Half, "one": Alone}


def own_part(batch, rank):
    """Return the rank's half of inputs and targets."""
    inputs, targets = batch
    count = len(targets) // RANKS
    return inputs[rank * count : (rank + 1) * count], targets[rank * count : (rank + 1) * count]


def own_rank():
    return int(os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0")))
