"""A worker of ours: ``ours.py WORKLOAD WORKER CONTACT KEY FOLDER [AHEAD]``."""

import sys
from pathlib import Path

import given
import torch
from turn import go_on, measured

from counterpoint.server.choices import Normal
from counterpoint.server.hosting import join, read_contact
from counterpoint.server.wire.key import read_key
from counterpoint.server.working.rhythm import Rhythm
from counterpoint.server.working.served import Served
from counterpoint.training.keeping import Keeping


def served(name, session, ahead):
    """Return the worker's copy of the model; tables begin as torch's do."""
    workload = given.workload(name)
    tables = {given.TABLE: Normal(0.0, 1.0)} if name == "D" else {}
    return Served(given.built(workload), session, workload.optimizer, tables=tables, rhythm=Rhythm(fetch_ahead=ahead))


def stepping(name, worker, copy):
    """Return ``step(number)``: rows of the next batch are on their way while this one is computed."""
    workload, batch, ahead = given.workload(name), given.own_batches(name, worker), copy.rhythm.fetch_ahead

    def expect(number):
        for other in range(number + 1, number + 1 + max(1, ahead)):
            copy.expect((batch(other)[0],), -1)

    def step(number):
        inputs, targets = batch(number)
        copy.begin(-1, (inputs,))
        if ahead:
            expect(number)
        loss = workload.loss(copy.model(inputs), targets)
        expect(number)
        loss.backward()
        copy.finish()
        return loss.item()

    return step


def main(name, worker, contact, key, folder, ahead="0"):
    torch.set_num_threads(1)
    secret = read_key(Path(key)) if key != "-" else None
    with join(read_contact(Path(contact)), f"worker-{worker}", secret) as session:
        copy = served(name, session, int(ahead))
        Keeping(wanted=True).begin()  # as cp.Elastic does
        step = stepping(name, int(worker), copy)
        done = measured(folder, f"worker-{worker}", step, warm_up=given.WARM_UP[name], steps=given.STEPS[name])
        go_on(folder, step, done)
        copy.settle()


if __name__ == "__main__":
    main(*sys.argv[1:])
