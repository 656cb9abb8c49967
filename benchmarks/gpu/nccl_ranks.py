"""Run every collective of NCCL among several processes on one GPU and check the results.

    LD_PRELOAD=libnccl.so.2 NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=2 \\
        python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/gpu/nccl_ranks.py

NCCL accepts several ranks on one device since 2.30. Times are of no use here: the ranks share the device.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist


def main() -> None:
    torch.cuda.set_device(0)
    start = time.perf_counter()
    dist.init_process_group("nccl")
    outcomes = run_collectives(start)
    total = torch.ones(1 << 16, device="cuda")
    start = time.perf_counter()
    for _ in range(20):
        dist.all_reduce(total)
    torch.cuda.synchronize()
    outcomes["ms per all_reduce of 256 KiB"] = round((time.perf_counter() - start) * 50, 2)
    if dist.get_rank() == 0:
        print(dist.get_world_size(), "ranks, NCCL", torch.cuda.nccl.version(), outcomes, flush=True)
    dist.destroy_process_group()


def run_collectives(start: float) -> dict[str, bool | float]:
    """Return by collective whether its result is right, and when the first one was complete."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    outcomes: dict[str, bool | float] = {}

    def check(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        outcomes[name] = bool(torch.equal(actual.cpu(), expected))

    n = 1 << 16
    values = [torch.arange(n, dtype=torch.float32) + r for r in range(num_ranks)]
    mine = values[rank].cuda()
    total = mine.clone()
    dist.all_reduce(total)
    check("all_reduce", total, sum(values))
    outcomes["seconds to the first result"] = round(time.perf_counter() - start, 2)
    gathered = torch.empty(n * num_ranks, device="cuda")
    dist.all_gather_into_tensor(gathered, mine)
    check("all_gather", gathered, torch.cat(values))
    share = torch.empty(n // num_ranks, device="cuda")
    dist.reduce_scatter_tensor(share, mine)
    check("reduce_scatter", share, sum(values).chunk(num_ranks)[rank])
    copy = mine.clone()
    dist.broadcast(copy, 0)
    check("broadcast", copy, values[0])
    received = torch.empty(n, device="cuda")
    operations = [
        dist.P2POp(dist.isend, mine, (rank + 1) % num_ranks),
        dist.P2POp(dist.irecv, received, (rank - 1) % num_ranks),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    check("send and recv", received, values[(rank - 1) % num_ranks])
    parts = torch.empty(n, device="cuda")
    dist.all_to_all_single(parts, mine)
    check("all_to_all", parts, torch.cat([value.chunk(num_ranks)[rank] for value in values]))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        overlapped = mine.clone()
        work = dist.all_reduce(overlapped, async_op=True)
    work.wait()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    check("all_reduce on a stream", overlapped, sum(values))
    return outcomes


if __name__ == "__main__":
    main()
