"""A script of two ranks: sums, a barrier, rows and updates on servers in processes of their own."""

import sys
from functools import partial

import torch

from counterpoint.compat import kvstore


def main(kind):
    """Write what this rank pulls; the second one fails before its last push if requested."""
    kv = kvstore.create(kind.removesuffix("-fails"), servers=2)
    kv.set_optimizer(partial(torch.optim.SGD, lr=0.5))
    kv.init(["w", "e"], [torch.full((2,), 5.0 - kv.rank), torch.eye(4).to_sparse(1)])
    out, rows = torch.zeros(2), torch.zeros(4, 4).to_sparse(1)
    kv.push(["w", "e"], [torch.full((2,), kv.rank + 1.0), torch.eye(4).to_sparse(1)])
    kv.barrier()
    kv.pull("w", out=out)
    kv.row_sparse_pull("e", out=rows, row_ids=torch.tensor([3]))
    sys.stdout.write(f"{kv.rank} {kv.num_workers} {out.tolist()} {rows.to_dense()[3].tolist()}\n")
    if kind.endswith("-fails") and kv.rank == 1:
        raise ValueError("rank 1 gives up")
    kv.push("w", torch.ones(2))
    kv.pull("w", out=out)


if __name__ == "__main__":
    main(*sys.argv[1:])
