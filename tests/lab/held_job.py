"""Jobs that strangers attack while they train: held before they end until a file is there, then they print their bits.

``held_job.py ranks GATE`` is one of two ranks; ``held_job.py worker SERVERS JOB KEY NAME GATE`` is a worker of a job with
so many servers.
"""

import hashlib
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import counterpoint as cp
from counterpoint.ps.job_config import Timeouts
from counterpoint.ps.process import join, read_job_file
from counterpoint.rpc.job_key import read_key
from tests.elastic.worker_fixtures import SGD, make_numeric_data, mlp

NUM_STEPS, HELD_STEP = 48, 44
STEP_S, LONGEST_S, LOOK_S = 0.02, 120.0, 0.02
TIMEOUTS = Timeouts(heartbeat_s=0.5, failure_timeout_s=10.0, lease_s=60.0, resend_s=0.5)


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Hold:
    """Slow down a rank's steps, say when training has begun, and hold one of the last ones until the gate is open."""

    def __init__(self, gate):
        self.gate, self.count = Path(gate), 0

    def __call__(self):
        self.count += 1
        threading.Event().wait(STEP_S)
        if self.count == 3:
            say("training")
        if self.count == HELD_STEP // 2:
            end_s = time.monotonic() + LONGEST_S
            while not self.gate.exists() and time.monotonic() < end_s:
                threading.Event().wait(LOOK_S)


class HoldSteps(cp.Callback):
    """Hold the ranks between two steps."""

    on_every_rank = True

    def __init__(self, gate):
        self.hold = Hold(gate)

    def on_step(self, event):
        self.hold()


def digest(model):
    """Return a digest of the bits of all weights."""
    return hashlib.sha256(b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())).hexdigest()


class HeldData(torch.utils.data.Dataset[tuple[torch.Tensor, ...]]):
    """The data of a worker, which are held when they are read."""

    def __init__(self, hold):
        self.data, self.hold = make_numeric_data(64), hold

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        if index % 8 == 0:  # about once in a slice
            self.hold()
        return self.data[index]


def elastic(num_servers, dataset=None):
    """Return a job whose result does not depend on its workers."""
    return cp.ElasticTrainer(
        dataset=dataset or make_numeric_data(64), batch_size=16, epochs=NUM_STEPS // 4, consistency="bsp", slices_per_step=2,
        servers=num_servers, name="far", timeouts=TIMEOUTS,
    )  # fmt: skip


def train_rank(gate):
    model = mlp()
    with cp.Trainer(
        model, loss=F.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.3), strategy="data(2)", progress="off",
        callbacks=[HoldSteps(gate)],
    ) as trainer:  # fmt: skip
        trainer.fit(make_numeric_data(64), batch_size=16, max_steps=NUM_STEPS, epochs=NUM_STEPS)
    say("bits", digest(model))


def train_worker(num_servers, job, key, name, gate):
    with join(read_job_file(Path(job)), name, read_key(Path(key))) as session:
        say("joined")
        model = mlp()
        elastic(int(num_servers), HeldData(Hold(gate))).train(session, model, loss=F.cross_entropy, optimizer=SGD)
    say("bits", digest(model))


if __name__ == "__main__":
    if sys.argv[1] == "ranks":
        train_rank(*sys.argv[2:])
    else:
        train_worker(*sys.argv[2:])
