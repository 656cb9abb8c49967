"""A worker of a job on several hosts: ``python -m tests.lab.worker JOB KEY NAME [GATE]``; it prints what it learnt."""

import json
import sys
import threading
from pathlib import Path

import torch.nn.functional as F

from counterpoint.server.hosting import join, read_contact
from counterpoint.server.job import Patience
from counterpoint.server.wire.key import read_key
from counterpoint.server.working.loop import Habits
from counterpoint.training.elastic import Elastic
from tests.server.working.crews import SGD, mlp, numbers

PATIENCE = Patience(beat_s=0.2, silence_s=5.0, lease_s=60.0, retry_s=0.5)
LOOK_S = 0.02


def plan(**options):
    return Elastic(
        dataset=numbers(64), batch_size=16, epochs=12, consistency="bsp(4)", servers=2, name="far", patience=PATIENCE,
        habits=Habits(checkpoint_every=40), **options,
    )  # fmt: skip


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main(job, key, name, gate=None):
    with join(read_contact(Path(job)), name, read_key(Path(key))) as session:
        say("joined")
        while gate is not None and not Path(gate).exists():
            threading.Event().wait(LOOK_S)
        model, count = mlp(), 0

        def loss(outputs, targets):
            nonlocal count
            count += 1
            say("portion", count)
            return F.cross_entropy(outputs, targets)

        plan().train(session, model, loss=loss, optimizer=SGD)
    say(json.dumps([parameter.tolist() for parameter in model.parameters()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
