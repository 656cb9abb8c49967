"""Contenders, each used as its documentation recommends; each gets its part of every batch, or the whole batch."""

import os

import torch
import torch.distributed as dist
from torch import nn
from workloads import RANKS, build_model

import counterpoint as cp


class SingleProcess:
    """A plain loop in one process on the whole batch."""

    def __init__(self, workload):
        self.workload = workload
        self.model = self.wrap_model(build_model(workload))
        self.optimizer = self.wrap_optimizer(workload.optimizer(self.model.parameters()))

    def wrap_model(self, model):
        return model

    def wrap_optimizer(self, optimizer):
        return optimizer

    def local_part(self, batch):
        return batch

    def step(self, batch):
        inputs, targets = self.local_part(batch)
        self.optimizer.zero_grad()
        loss = self.workload.loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def mean_loss(self, loss):
        return loss

    def close(self):
        pass


class HalfBatch(SingleProcess):
    """A plain loop in one process on its rank's part of the batch: no communication."""

    def local_part(self, batch):
        return local_shard(batch, rank_from_env())


class Counterpoint:
    """The default plan of strategy="data" on one host."""

    def __init__(self, workload):
        self.run = cp.parallelize(build_model(workload), workload.optimizer, workload.loss, strategy="data")

    def step(self, batch):
        return self.run(*batch)

    def mean_loss(self, loss):
        return loss

    def close(self):
        self.run.close()


class DDP(SingleProcess):
    """torch's DistributedDataParallel on gloo."""

    def __init__(self, workload):
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        super().__init__(workload)

    def wrap_model(self, model):
        return nn.parallel.DistributedDataParallel(model)

    def local_part(self, batch):
        return local_shard(batch, self.rank)

    def mean_loss(self, loss):
        total = torch.tensor(loss)
        dist.all_reduce(total)
        return total.item() / RANKS

    def close(self):
        dist.destroy_process_group()


class Horovod(SingleProcess):
    """Horovod's DistributedOptimizer on gloo."""

    def __init__(self, workload):
        import horovod.torch as hvd

        self.hvd = hvd
        hvd.init()
        self.rank = hvd.rank()
        super().__init__(workload)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def wrap_optimizer(self, optimizer):
        return self.hvd.DistributedOptimizer(optimizer, named_parameters=self.model.named_parameters())

    def local_part(self, batch):
        return local_shard(batch, self.rank)

    def mean_loss(self, loss):
        return self.hvd.allreduce(torch.tensor(loss), name="loss").item()

    def close(self):
        self.hvd.shutdown()


class DeepSpeed(SingleProcess):
    """DeepSpeed's engine at ZeRO stage 0."""

    def __init__(self, workload):
        import deepspeed

        deepspeed.init_distributed("gloo")
        self.workload, self.rank = workload, dist.get_rank()
        model = build_model(workload)
        config = {  # its default clips by norm, which would change the training
            "train_micro_batch_size_per_gpu": workload.size // RANKS,
            "zero_optimization": {"stage": 0},
            "gradient_clipping": 0.0,
        }
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=workload.optimizer(model.parameters()), config=config
        )

    def step(self, batch):
        inputs, targets = local_shard(batch, self.rank)
        loss = self.workload.loss(self.engine(inputs), targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()

    def mean_loss(self, loss):
        total = torch.tensor(loss)
        dist.all_reduce(total)
        return total.item() / RANKS

    def close(self):
        dist.destroy_process_group()


CONTENDERS = {
    "ours": Counterpoint,
    "ddp": DDP,
    "horovod": Horovod,
    "deepspeed": DeepSpeed,
    "half": HalfBatch,
    "one": SingleProcess,
}


def local_shard(batch, rank):
    """Return the rank's half of inputs and targets."""
    inputs, targets = batch
    count = len(targets) // RANKS
    return inputs[rank * count : (rank + 1) * count], targets[rank * count : (rank + 1) * count]


def rank_from_env():
    return int(os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0")))
