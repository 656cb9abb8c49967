"""One rank of one contender's run: trains and prints seconds, losses and memory as JSON."""

import json
import sys
import time
import weakref
from pathlib import Path

import torch

import counterpoint as cp
from counterpoint.jobs.job import sequence_loss

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))

import contenders


class SavedTensor:
    """A tensor saved by autograd; alive as long as autograd holds it."""

    def __init__(self, tensor):
        self.tensor = tensor


class SavedBytesCounter:
    """Counter of the bytes that a rank saves for its backwards, updated between instructions."""

    def __init__(self, rank):
        self.executor = rank.interpreter.executor
        self.saved = weakref.WeakSet()
        self.weights = {tensor.untyped_storage().data_ptr() for tensor in rank.interpreter.store.params.values()}
        self.max_bytes = 0

    def pack(self, tensor):
        box = SavedTensor(tensor)
        self.saved.add(box)
        return box

    def count(self):
        kept = [
            tensor
            for saved_forward in self.executor.recompute_store.saved.values()
            for tensor in saved_forward.leaves
            if tensor is not None
        ]
        kept += [stored.value for stored in self.executor.values.values()]
        storages = [tensor.untyped_storage() for tensor in (*kept, *(box.tensor for box in self.saved))]
        sizes = {one.data_ptr(): one.nbytes() for one in storages if one.data_ptr() not in self.weights}
        self.max_bytes = max(self.max_bytes, sum(sizes.values()))
        return 0.0


def saved_bytes(step, batch):
    (rank,) = step.local_ranks.ranks.values()
    saved = SavedBytesCounter(rank)
    rank.interpreter.use_clock(saved.count)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda box: box.tensor):
        loss = step(*batch)
    rank.interpreter.use_clock(None)
    return saved.max_bytes, loss


def peak_bytes():
    """Return the peak resident memory of this process."""
    with Path("/proc/self/status").open() as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def main(text, passes, size, warm_up, steps):
    torch.set_num_threads(1)
    shape = contenders.SHAPES[size]
    draw = torch.Generator().manual_seed(1)
    plan = cp.Plan.parse(text, num_microbatches=contenders.MICROS)
    plan = cp.Plan(plan.strategies, plan.num_microbatches, tuple(passes.split()))
    losses, seconds = [], []
    with cp.parallelize(contenders.build_model(shape), contenders.make_optimizer, sequence_loss, strategy=plan) as step:
        for number in range(warm_up + steps):
            batch = contenders.draw_batch(shape, draw)
            began = time.perf_counter()
            losses.append(step(*batch))
            if number >= warm_up:
                seconds.append(time.perf_counter() - began)
        process = peak_bytes()
        most, loss = saved_bytes(step, contenders.draw_batch(shape, draw))
        losses.append(loss)
        found = {
            "rank": contenders.rank_from_env(),
            "seconds": seconds,
            "losses": losses,
            "saved": most,
            "process": process,
        }
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
