"""Small states for the tests of checkpoints."""

import torch

from counterpoint.checkpoint import Checkpoint, begin, commit, save, whole_tensor, write_shard


def tensors(step=1):
    torch.manual_seed(step)
    return {"fc.weight": torch.randn(6, 5), "fc.bias": torch.randn(6), "steps": torch.tensor(step)}


def save_step(root, step=1, **options):
    return save(root, step, tensors(step), {"epoch": step}, **options)


def save_through(files, root, step=1, keep=None):
    with begin(root, step, files=files) as draft:
        half = {0: ["fc.weight", "steps"], 1: ["fc.bias"]}
        records = [
            write_shard(draft.folder, rank, [whole_tensor(name, tensors(step)[name]) for name in names], files=files)
            for rank, names in half.items()
        ]
        return commit(draft, records, state={"epoch": step}, keep=keep, files=files)


def holds_exactly(checkpoint: Checkpoint, step: int) -> bool:
    wanted = tensors(step)
    return checkpoint.state == {"epoch": step} and all(
        torch.equal(checkpoint.read(name), wanted[name]) for name in wanted
    )
