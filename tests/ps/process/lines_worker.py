"""A worker as a process: it trains the job ``lines``, whose table lies on servers, until all lines are counted."""

from itertools import count
from pathlib import Path
from typing import Any

from counterpoint.elastic.remote_module import RemoteModule
from counterpoint.jobs.registry import find_job
from counterpoint.ps.consistency import Asp, Bsp, Consistency, Ssp
from counterpoint.ps.job_config import RetryPolicy
from counterpoint.ps.process.job_file import read_job_file
from counterpoint.ps.process.join_job import join
from counterpoint.ps.update_rules import UniformInit
from counterpoint.training.elastic_trainer import ElasticTrainer, evaluate_replica
from counterpoint.training.evaluation import make_loss_metric

LINES = find_job("lines")
WIDTH = 32
TABLES = {"table.weight": UniformInit(-1 / WIDTH, 1 / WIDTH)}
EPOCHS = 1
EVALUATED_AT_ONCE = 1000


def elastic(consistency, num_servers, timeouts):
    """The job as ``counterpoint train lines`` does it."""
    train, _ = LINES.build_data()
    return ElasticTrainer(
        dataset=train, batch_size=LINES.batch_size, epochs=EPOCHS, servers=num_servers, **written(consistency),
        name="lines", retry_policy=RetryPolicy(1000, 10_000), timeouts=timeouts,
    )  # fmt: skip


def written(consistency: Consistency) -> dict[str, Any]:
    """A consistency as it is written for `ElasticTrainer`."""
    match consistency:
        case Asp():
            return {"consistency": "asp"}
        case Ssp():
            return {"consistency": "ssp", "staleness": consistency.staleness}
        case Bsp():
            return {"consistency": "bsp", "slices_per_step": consistency.slices_per_step}


def work(session, num_looks=0):
    """All lines are counted, or this worker has left."""
    job, looks = session.job, count(1)
    elastic(job.consistency, job.num_servers, job.timeouts).train(
        session, LINES.build_model(0), loss=LINES.loss, optimizer=LINES.optimizer, tables=TABLES,
        should_stop=lambda: next(looks) == num_looks,
    )  # fmt: skip


def held_out_loss(session):
    """The mean loss over the held-out lines, by what the servers have."""
    _, held_out = LINES.build_data()
    served = RemoteModule(LINES.build_model(0), session, LINES.optimizer, tables=TABLES)
    return evaluate_replica(served, held_out, make_loss_metric(LINES.loss), EVALUATED_AT_ONCE)["loss"]


def main(contact, name, num_looks):
    """The worker has joined, worked and left."""
    with join(read_job_file(Path(contact)), name) as session:
        work(session, int(num_looks))
