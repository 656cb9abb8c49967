"""torch.distributed.rpc as in its parameter server tutorials: ``torch_rpc.py ROLE WORKLOAD WORKERS FOLDER [keeping]``.

MLP: "Implementing Batch RPC Processing Using Asynchronous Executions", with an update batch of one, so that no worker
waits for another. D: "Combining Distributed DataParallel with Distributed RPC Framework": the table is on the server
and looked up there under distributed autograd; the layers after it use DistributedDataParallel on the workers.
"""

import os
import sys
import threading

import server_workloads
import torch
import torch.distributed as dist
from timed_run import keep_stepping, time_steps
from torch import nn, optim
from torch.distributed import autograd as dist_autograd, rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer

from counterpoint.training.ranks.process_memory import RetainedMemory

SERVER, MASTER = "ps", "master"


class ParameterServer:
    """The tutorial's BatchUpdateParameterServer."""

    def __init__(self, name, batch_update_size):
        workload = server_workloads.workload(name)
        self.model = server_workloads.build_model(workload)
        self.lock = threading.Lock()
        self.future_model = torch.futures.Future()
        self.batch_update_size = batch_update_size
        self.curr_update_size = 0
        self.optimizer = workload.optimizer(self.model.parameters())
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)

    def get_model(self):
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch_model(ps_rref, grads):
        self = ps_rref.local_value()
        with self.lock:
            self.curr_update_size += 1
            for p, g in zip(self.model.parameters(), grads, strict=True):
                p.grad += g
            fut = self.future_model
            if self.curr_update_size >= self.batch_update_size:
                for p in self.model.parameters():
                    p.grad /= self.batch_update_size
                self.curr_update_size = 0
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                fut.set_result(self.model)
                self.future_model = torch.futures.Future()
        return fut


def train_dense(name, ps_rref, worker, folder):
    """The tutorial's Trainer."""
    workload, batch = server_workloads.workload(name), server_workloads.worker_batches(name, worker)
    m = ps_rref.rpc_sync().get_model()

    def step(number):
        nonlocal m
        inputs, labels = batch(number)
        loss = workload.loss(m(inputs), labels)
        loss.backward()
        m = rpc.rpc_sync(
            ps_rref.owner(), ParameterServer.update_and_fetch_model, args=(ps_rref, [p.grad for p in m.parameters()])
        )
        return loss.item()

    measure(name, folder, worker, step)


class HybridModel(nn.Module):
    """The tutorial's HybridModel: the table is remote, the layers after it are replicated."""

    def __init__(self, remote_emb_module, top):
        super().__init__()
        self.remote_emb_module = remote_emb_module
        self.fc = nn.parallel.DistributedDataParallel(top)

    def forward(self, indices):
        return self.fc(self.remote_emb_module.forward(indices))


def train_hybrid(name, remote_emb_module, worker, num_workers, folder):
    """The tutorial's _run_trainer."""
    address = f"tcp://{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT']) + 1}"
    dist.init_process_group("gloo", rank=worker, world_size=num_workers, init_method=address)
    workload, batch = server_workloads.workload(name), server_workloads.worker_batches(name, worker)
    model = HybridModel(remote_emb_module, server_workloads.build_model(workload).top)
    rrefs = [*remote_emb_module.remote_parameters(), *(rpc.RRef(param) for param in model.fc.parameters())]
    opt = DistributedOptimizer(optim.SGD, rrefs, lr=0.01)

    def step(number):
        inputs, labels = batch(number)
        with dist_autograd.context() as context_id:
            loss = workload.loss(model(inputs), labels)
            dist_autograd.backward(context_id, [loss])
            opt.step(context_id)
        return loss.item()

    measure(name, folder, worker, step)


def measure(name, folder, worker, step):
    done = time_steps(
        folder,
        f"worker-{worker}",
        step,
        warm_up=server_workloads.WARM_UP[name],
        steps=server_workloads.STEPS[name],
    )
    keep_stepping(folder, step, done)


def main(role, name, num_workers, folder, *words):
    torch.set_num_threads(1)
    num_workers = int(num_workers)
    if words:
        RetainedMemory(enabled=True).start()
    names = [f"trainer{worker}" for worker in range(num_workers)] + [MASTER, SERVER]
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=300)
    rpc.init_rpc(role, rank=names.index(role), world_size=len(names), rpc_backend_options=options)
    if role == MASTER:
        if name == "MLP":
            target, first = train_dense, (rpc.remote(SERVER, ParameterServer, args=(name, 1)),)
        else:
            table = {"mode": "sum", "sparse": True}
            first = (
                RemoteModule(
                    SERVER, nn.EmbeddingBag, args=(server_workloads.NUM_ROWS, server_workloads.WIDTH), kwargs=table
                ),
            )
            target = train_hybrid
        more = () if name == "MLP" else (num_workers,)
        futures = [
            rpc.rpc_async(trainer, target, args=(name, *first, worker, *more, folder))
            for worker, trainer in enumerate(names[:num_workers])
        ]
        for future in futures:
            future.wait()
    rpc.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
