"""What ranks on Spark run in tests; executors import it."""

import os
import runpy
import signal
import sys
from pathlib import Path

import torch

import counterpoint as cp
from counterpoint.launchers.environment import detect
from counterpoint.rpc.job_key import read_key
from tests.spark.training_helpers import Adam, make_net, mse


def current_rank():
    """Return the rank that the launcher's environment describes."""
    result = detect()
    assert result is not None
    return result


def describe_rank(word):
    """Which rank this is, and whether its key is a secret that no variable shows."""
    result = current_rank()
    key = read_key(Path(str(result.key_file))).secret
    return {
        "rank": result.rank,
        "world": result.world_size,
        "word": word,
        "key": torch.tensor(list(key)),
        "is_shown": any(key.hex() in value for value in os.environ.values()),
    }


def train_on_all(shard, strategy, batch_size, steps):
    """The parameters after so many steps on the samples of all ranks."""
    data, model = shard.all_samples(), make_net()
    trainer = cp.Trainer(model, loss=mse, optimizer=Adam, strategy=strategy, progress="off")
    history = trainer.fit(data, batch_size=batch_size, epochs=100, max_steps=steps)
    trainer.close()
    return {"losses": history.losses, "own": len(shard), "params": [param.detach() for param in model.parameters()]}


def train_on_local(shard):
    """The parameters after one step on the samples where they are."""
    model = make_net()
    with cp.parallelize(model, Adam, mse, batches="per_rank", uneven=True) as step:
        if len(shard):
            step(*shard.local_samples.tensors)
        step.finish()
    return [param.detach() for param in model.parameters()]


def count_samples(shard):
    """How many samples this rank has and all have, and of which kinds."""
    return [len(shard), len(shard.all_samples()), [str(field.dtype) for field in shard.fields]]


def raise_on_rank(culprit):
    """One rank fails, the others would stay for ever."""
    if current_rank().rank == culprit:
        raise ValueError("the cat sat on the keyboard")
    signal.pause()


def kill_rank(culprit):
    """One rank is killed, the others would stay for ever."""
    if current_rank().rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def run_script(script, folder):
    """A script that knows nothing of Spark, as any launcher would start it."""
    sys.argv = [script, folder]
    runpy.run_path(script, run_name="__main__")
