"""What ranks do in the tests of real processes: functions that run in every one of them."""

import os
import resource
import signal
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset

import counterpoint as cp
from counterpoint.checkpoint import Checkpoint
from counterpoint.errors import StoppedBySignal
from counterpoint.launchers.environment import detect
from counterpoint.testing.parity import relative_difference
from counterpoint.training.distributed_world import open_world
from tests.equivalence import async_pipeline_cases as streamed
from tests.equivalence.fit_cases import Fitted
from tests.training.several_models import train_adversaries, train_in_turns
from tests.training.trainers import ADAMW, build_seeded, dataset, equal_bits, make_trainer, mlp, params_of, state_of


def rank():
    return int(os.environ["RANK"])


def plan_of(text, num_microbatches):
    return cp.Plan.parse(text, num_microbatches=num_microbatches)


def stream(cases):
    """Return what came of each case on this process's ranks."""
    result = []
    for fields in cases:
        case = streamed.Case(**fields)
        with closing(open_world(detect(), case.plan.num_ranks, 30.0)) as world:
            result.append(streamed.train(case, world))
    return result


def train(rows, expected, folder, served, saved, periods):
    """Return what came of all plans of one start of the processes."""
    apart = [compare([row], expected_run)[0] for row, expected_run in periods]
    compared = compare(rows, expected)
    return {"compared": compared, "served": serve(served), "saved": resume_saved(folder, saved), "periods": apart}


def compare(rows, expected):
    """Return for each plan how far its parameters, losses and metric are from what solo came to."""
    params, losses, metric = expected
    result = []
    for text, num_microbatches in rows:
        with make_trainer(plan_of(text, num_microbatches)) as one:
            history = one.fit(dataset(), batch_size=12, epochs=2, eval_dataset=dataset(7))
            mine = params_of(one.model)
        worst = max(relative_difference(mine[name], value) for name, value in params.items())
        off = max(abs(own / other - 1) for own, other in zip(history.losses, losses, strict=True))
        result.append([worst, off, abs(history.evaluations[-1].metrics["loss"] / metric - 1)])
    return result


def serve(rows):
    """Return for each plan with an asynchronous server the first and the last loss, and the weights."""
    result = []
    for text in rows:
        with make_trainer(plan_of(text, 2)) as one:
            history = one.fit(dataset(48), batch_size=12, epochs=8, eval_dataset=dataset(48))
            losses = [event.metrics["loss"] for event in history.evaluations]
            result.append((losses[0], losses[-1], params_of(one.model)))
    return result


def resume_saved(folder, rows):
    """Return for each plan whether a run that was saved in mid-epoch continues bit for bit."""
    result = []
    for at, (text, num_microbatches) in enumerate(rows):
        states = []
        for name, resume, steps in [("a", None, 8), ("b", None, 2), ("b", f"{folder}/{at}b", 8)]:
            with make_trainer(plan_of(text, num_microbatches)) as one:
                one.fit(dataset(), batch_size=12, epochs=2, max_steps=steps, checkpoint_dir=f"{folder}/{at}{name}",
                        save_every=2, resume=resume)  # fmt: skip
                states.append(state_of(one.model))
        result.append([equal_bits(states[0], states[2]), equal_bits(states[0], states[1])])
    return result


class SignalLater(cp.Callback):
    """Sends one of the ranks a signal at any moment of the run, and counts the steps of this rank."""

    on_every_rank = True

    def __init__(self, seconds, target):
        self.timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
        self.is_target = rank() == target
        self.num_steps = 0
        self.start_s = self.seconds = 0.0

    def on_start(self, event):
        self.num_steps, self.start_s = event.first_step, time.perf_counter()
        if self.is_target:
            self.timer.start()

    def on_step(self, event):
        self.num_steps = event.step + 1

    def on_end(self, event):
        self.seconds = time.perf_counter() - self.start_s
        self.timer.cancel()
        if self.is_target:
            self.timer.join()


def stop_at_moments(folder, rows, num_moments, seed):
    """Return for each plan, for each moment, steps taken and saved, and whether the resumed run has the same bits."""
    random, found = Random(seed), []
    for at, (text, num_microbatches) in enumerate(rows):
        for attempt in range(2):  # the first one of a process takes longer
            whole, _, took_s = stop_once(plan_of(text, num_microbatches), f"{folder}/{at}whole{attempt}", 999.0, 0)
        for moment in range(num_moments):
            plan, path = plan_of(text, num_microbatches), f"{folder}/{at}-{moment}"
            _, counts, _ = stop_once(plan, path, random.uniform(0.0, 0.9 * took_s), random.randrange(2))
            state, _, _ = stop_once(plan, path, 999.0, 0)
            found.append([text, *counts, equal_bits(state, whole)])
    return found


def stop_once(plan, path, seconds, target):
    """Train until the end or a signal; return the state, the steps taken and saved and the exit code, and the time."""
    later, code = SignalLater(seconds, target), 0
    with make_trainer(plan, callbacks=[later], progress="off") as one:
        try:
            one.fit(dataset(), batch_size=12, epochs=4, checkpoint_dir=path, resume="auto")
        except StoppedBySignal as stop:
            code = int(str(stop.code))
        return state_of(one.model), [later.num_steps, Checkpoint.open(path).step, code], later.seconds


class SignalsAlone(cp.Callback):
    """Sends the last rank a signal after its third step."""

    on_every_rank = True

    def on_step(self, event):
        if event.step == 2 and rank() == int(os.environ["WORLD_SIZE"]) - 1:
            signal.raise_signal(signal.SIGTERM)


def stop_alone(folder, texts):
    """Return for each plan the exit code, the steps taken and the step saved in an epoch of forty."""
    found = []
    for at, text in enumerate(texts):
        later, code = SignalLater(999.0, -1), 0
        with make_trainer(plan_of(text, 2), callbacks=[later, SignalsAlone()], progress="off") as one:
            try:
                one.fit(dataset(480), batch_size=12, epochs=1, checkpoint_dir=f"{folder}/{at}")
            except StoppedBySignal as stop:
                code = int(str(stop.code))
        found.append([code, later.num_steps, Checkpoint.open(Path(folder, str(at))).step])
    return found


class Dies(cp.Callback):
    """Kills rank 1 after a step, at once and silently."""

    on_every_rank = True

    def __init__(self, step):
        self.step = step

    def on_step(self, event):
        if rank() == 1 and event.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def save_apart(fields, folder, dies, resume):
    """Return the parameters after a fit whose stages save independently, in which rank 1 may die."""
    return Fitted(**fields).fit(folder, callbacks=[Dies(dies)], resume=folder if resume else None)


def text_of(run):
    """Return the error that a run ends with, as text."""
    try:
        run()
    except Exception as error:  # noqa: BLE001 - reported to the test
        return f"{type(error).__name__}: {error}"
    return "no error"


def tell(text):
    """Write one line where the launcher reads it."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class ListensBadly(cp.Callback):
    """Fails on rank 1 between two steps, where no other rank can see it."""

    on_every_rank = True

    def on_step(self, event):
        if rank() == 1 and event.step == 1:
            raise OSError("the disk is full")


def fail():
    """Print what this rank gets when rank 1 has another model; then train until rank 1 fails."""
    deeper = build_seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
    model = mlp() if rank() == 0 else deeper
    tell(text_of(lambda: make_trainer("data(2)", model).fit(dataset(), batch_size=12)))
    failing = make_trainer("data(2)", callbacks=[ListensBadly()])
    error_text = text_of(lambda: failing.fit(dataset(), batch_size=12))
    tell(error_text)
    raise cp.PeerError("rank 1 has failed") if rank() == 0 else OSError(error_text)


def shard_by_hand(*sizes):
    """Train in a custom loop; in each step the ranks pass batches of these sizes."""
    inputs, targets = dataset().tensors
    step = cp.parallelize(mlp(), ADAMW, F.cross_entropy, strategy="data(2)")
    for lengths in sizes:
        step(inputs[: lengths[rank()]], targets[: lengths[rank()]])


class BranchingLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2 if x.abs().sum() > 10 else 1)


def branch_in_one_half():
    """Pass a second batch whose second half takes another branch."""
    torch.manual_seed(0)
    model, x, y = BranchingLinear(4, 2), torch.full((6, 4), 0.001), torch.ones(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, optimizer, nn.MSELoss(), strategy="data(2)") as step:
        step(x, y)
        step(torch.cat([x[:3], x[3:] * 1000]), y)


def pass_own_batches():
    """Train in a custom loop on batches of one size that differ from rank to rank."""
    inputs, targets = dataset().tensors
    step = cp.parallelize(mlp(), ADAMW, F.cross_entropy, strategy="data(2)")
    step(inputs[rank() :: 2], targets[rank() :: 2])


def shard_the_dataset():
    """Train on half of a dataset on each rank, as a sampler would have chosen it."""
    make_trainer("data(2)").fit(Subset(dataset(), range(rank(), 46, 2)), batch_size=12)


def open_data(kind, seed=0):
    """Return training data of a kind, which shuffle by a seed of their own."""
    data = dataset()
    generator = torch.Generator().manual_seed(seed)
    match kind:
        case "loader":
            return DataLoader(data, batch_size=12, shuffle=True, generator=generator)
        case "collated":
            return DataLoader(data, batch_size=12, shuffle=True, generator=generator, collate_fn=center)
        case _:
            return lambda: (data[torch.randperm(46)[:12].tolist()] for _ in range(4))


def center(samples):
    """Make a batch of samples, whose inputs have a mean of 0."""
    inputs, targets = (torch.stack(part) for part in zip(*samples, strict=True))
    return inputs - inputs.mean(0), targets


def train_on(kind):
    """Return the losses of two epochs, and the parameters."""
    with make_trainer("data(2)") as one:
        return [
            one.fit(open_data(kind), epochs=2).losses,
            {name: values.tolist() for name, values in params_of(one.model).items()},
        ]


def differ_in(what):
    """Train with something that is another one on rank 1."""
    is_other = rank() == 1
    options = {"seed": 5} if what == "seed" and is_other else {}
    arguments = {"epochs": 3} if what == "epochs" and is_other else {}
    data = open_data("loader", seed=int(what == "sampler" and is_other))
    with make_trainer("data(2)", **options) as one:
        if what.startswith("second"):
            one.fit(data, max_steps=1)
            data = open_data("loader", seed=int(is_other))
        one.fit(data, **arguments)


def measure_and_train():
    """Return which plan ``auto`` has taken after trials, what these took, and what was trained under it."""
    with cp.Trainer(
        mlp(),
        loss=F.cross_entropy,
        optimizer=ADAMW,
        strategy="auto",
        num_measured_plans=2,
        progress="off",
        batch_norm="deferred",
    ) as one:
        history = one.fit(dataset(), batch_size=12)
        assert one.choice is not None, "it was left open"
        trials = {str(trial.plan): trial.step_s for trial in one.choice.trials}
        return {
            "plan": str(one.choice.plan), "trials": trials, "params": params_of(one.model), "losses": history.losses
        }  # fmt: skip


def train_several(strategy):
    """The losses of adversaries, and of two optimizers that train one model in turns."""
    make = partial(cp.parallelize, strategy=strategy)
    return train_adversaries(make, make, gathers=True)[0] + train_in_turns(make, make)[0]


def train_prefetched(plans, transport):
    """The losses of each plan with the pass ``prefetch`` of two depths, after those without it."""
    environment = detect()
    assert environment is not None, "a launcher has started the ranks"
    return [
        train_with_passes(plan_of(*plan), passes, replace(environment, transport=transport))
        for plan in plans
        for passes in (("overlap",), ("overlap", "prefetch"), ("overlap", "prefetch:2"))
    ]


def train_offloaded(plans, transport, folder, moved=("offload:state=disk",)):
    """The losses of each plan with passes that move something to disk, after those with it in memory."""
    environment = detect()
    assert environment is not None, "a launcher has started the ranks"
    return [
        train_with_passes(plan_of(*plan), passes, replace(environment, transport=transport), offload_folder=folder)
        for plan in plans
        for passes in (("overlap",), ("overlap", *moved))
    ]


def train_where_rank_1_has_no_room(plans, folder, moved="offload:state=disk"):
    """The error of each plan, if the files of rank 1 may have 2 KiB only."""
    if rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
    errors = []
    for plan in plans:
        try:
            train_with_passes(plan_of(*plan), ("overlap", moved), detect(), offload_folder=folder)
        except cp.CounterpointError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def train_with_passes(plan, passes, environment, **options):
    model = mlp()
    inputs, targets = dataset(12).tensors
    with cp.parallelize(
        model,
        ADAMW(model.parameters()),
        F.cross_entropy,
        strategy=replace(plan, passes=passes),
        environment=environment,
        **options,
    ) as step:
        return [float(step(inputs, targets)) for _ in range(6)]
