"""Worker of a job on several hosts: ``python -m tests.lab.ps_worker JOB KEY NAME [GATE]``; it prints what it learnt."""

import json
import sys
import threading
from pathlib import Path

import torch.nn.functional as F

from counterpoint.elastic.ps_worker import WorkerConfig
from counterpoint.ps.job_config import Timeouts
from counterpoint.ps.process import join, read_job_file
from counterpoint.rpc.job_key import read_key
from counterpoint.training.elastic_trainer import ElasticTrainer
from tests.elastic.worker_fixtures import SGD, make_numeric_data, mlp

TIMEOUTS = Timeouts(heartbeat_s=0.2, failure_timeout_s=5.0, lease_s=60.0, resend_s=0.5)
LOOK_S = 0.02


def plan(**options):
    return ElasticTrainer(
        dataset=make_numeric_data(64), batch_size=16, epochs=12, consistency="bsp", servers=2, name="far", timeouts=TIMEOUTS,
        worker_config=WorkerConfig(checkpoint_every_slices=40), **options,
    )  # fmt: skip


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main(job, key, name, gate=None):
    with join(read_job_file(Path(job)), name, read_key(Path(key))) as session:
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
