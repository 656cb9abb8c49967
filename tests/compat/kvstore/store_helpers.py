"""Stores of one job in one thread, and what the tests do with them."""

import torch

from counterpoint.compat import kvstore
from counterpoint.ps.in_process import LocalJob


def stores(name, num_workers, num_servers=1):
    """Return a store for each worker of a new job."""
    job = kvstore.make_job(num_workers=num_workers, num_servers=num_servers, is_async="async" in name)
    servers = LocalJob(job)
    return [
        kvstore.create(name, member=kvstore.KVStoreMember(servers.join(f"worker-{rank}"), rank, num_workers))
        for rank in range(num_workers)
    ]


def pull(kv, key, *shape):
    """Return what a pull writes."""
    out = torch.full(shape, -1.0)
    kv.pull(key, out=out)
    return out


def sparse_rows(numbers, values, num_rows):
    """Return a tensor that has these rows by number, each filled with its value."""
    filled = torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, 2)
    return torch.sparse_coo_tensor(torch.tensor([numbers]), filled, (num_rows, 2), check_invariants=True)
