"""A worker as a process: it trains the job ``lines``, whose table lies on servers, until all lines are counted."""

from itertools import count
from pathlib import Path

from counterpoint.jobs.table import find
from counterpoint.server.choices import Uniform
from counterpoint.server.hosting.contact import read_contact
from counterpoint.server.hosting.joining import join
from counterpoint.server.job import Asp, Bsp, Budget, Consistency, Ssp
from counterpoint.server.working.served import Served
from counterpoint.training.elastic import Elastic, evaluate
from counterpoint.training.evaluation import measuring

LINES = find("lines")
WIDTH = 32
TABLES = {"table.weight": Uniform(-1 / WIDTH, 1 / WIDTH)}
EPOCHS = 1
EVALUATED_AT_ONCE = 1000


def elastic(consistency, num_servers, patience):
    """The job as ``counterpoint train lines`` does it."""
    train, _ = LINES.build_data()
    return Elastic(
        dataset=train, batch_size=LINES.batch_size, epochs=EPOCHS, consistency=consistency, servers=num_servers,
        name="lines", budget=Budget(1000, 10_000), patience=patience,
    )  # fmt: skip


def written(consistency: Consistency) -> str:
    """A consistency as it is written for `Elastic`."""
    match consistency:
        case Asp():
            return "asp"
        case Ssp():
            return f"ssp({consistency.staleness})"
        case Bsp():
            return f"bsp({consistency.portions})"


def work(session, num_looks=0):
    """All lines are counted, or this worker has left."""
    job, looks = session.job, count(1)
    elastic(written(job.consistency), job.num_servers, job.patience).train(
        session, LINES.build_model(0), loss=LINES.loss, optimizer=LINES.optimizer, tables=TABLES,
        must_go=lambda: next(looks) == num_looks,
    )  # fmt: skip


def held_out_loss(session):
    """The mean loss over the held-out lines, by what the servers have."""
    _, held_out = LINES.build_data()
    served = Served(LINES.build_model(0), session, LINES.optimizer, tables=TABLES)
    return evaluate(served, held_out, measuring(LINES.loss), EVALUATED_AT_ONCE)["loss"]


def main(contact, name, num_looks):
    """The worker has joined, worked and left."""
    with join(read_contact(Path(contact)), name) as session:
        work(session, int(num_looks))
