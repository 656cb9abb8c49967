"""A VGG on four hosts of the lab under pipelines and data parallelism, and what the planner says of each."""

import json
import statistics
import sys
from pathlib import Path

from counterpoint.compiler.compile import compile as compiled
from counterpoint.cutting.choose import cut_model
from counterpoint.errors import LaunchError
from counterpoint.plan import Plan
from counterpoint.planner.choose import choose
from counterpoint.planner.rank import predict
from counterpoint.runtime.build import call_form
from counterpoint.runtime.optimizers import Face
from counterpoint.testing.claims import Options, Result
from counterpoint.training.choice import PASSES, trace_spec
from counterpoint.world.cluster import Cluster, Device, Link

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lab import Lab
from benchmarks.lab.network import bytes_per_s
from benchmarks.vgg import workload

ROUNDS, RATE, LATENCY_S = 3, "200mbit", 100e-6
REFERENCE, CLAIMED, PEER = "data(4)", "pipedream(4)", "DDP on gloo"
FASTER, FEWER, LEAST_OF_PEER = 3.0, 0.85, 1.0
HEADERS = 0.10  # of frames, acknowledgements and announcements, above the bytes of the tensors
BACKWARD = 2  # a backward costs so many forwards, as the simulator takes it


def on_hosts(number):
    """Return what each rank has seen in a round."""
    command = [sys.executable, str(Path(__file__).with_name("ranks.py")), str(number)]
    with Lab(hosts=workload.HOSTS, rate=RATE) as lab:
        return [json.loads(one.text().splitlines()[-1]) for one in lab.run_ranks(command, deadline_s=240)]


def merged(ranks):
    """Return the sides of a round: seconds until the last rank was done, bytes of all hosts."""
    found = {}
    for name in workload.SIDES:
        seen = [rank["sides"][name] for rank in ranks]
        found[name] = {
            "samples/s": workload.STEPS * workload.BATCH / max(one["seconds"] for one in seen),
            "sent": sum(one["sent"] for one in seen) / workload.STEPS,
            "epochs": [max(times) for times in zip(*(one.get("epochs", []) for one in seen), strict=True)],
            "accuracy": seen[0].get("accuracy", []),
        }
    return found


def planned(rounds, images):
    """Return what the planner says of each side's step, and which plan it would choose of all that it tries."""
    model = workload.vgg()
    face = Face(workload.SIDES[REFERENCE].optimizer, dict(model.named_parameters()))
    spec = trace_spec(model, face, images, None)
    alone = (zip(*(one["alone"] for one in ranks), strict=True) for ranks in rounds)
    alone_s = statistics.median(max(times) for turns in alone for times in turns)
    cost = sum(block.cost for block in spec.blocks) * workload.BATCH
    device = Device(cost_per_s=(1 + BACKWARD) * cost / alone_s)
    cluster = Cluster(device, Link(LATENCY_S, bytes_per_s(RATE)))
    said = {}
    for name, side in workload.SIDES.items():
        plan = Plan.parse(side.strategy or REFERENCE, num_microbatches=side.micros)
        cut = cut_model(model, call_form(images), need=plan.need).spec
        made = predict(Plan(plan.strategies, plan.num_microbatches, PASSES), cut, cluster, batch_size=workload.BATCH)
        sent = compiled(plan, cut, samples_per_micro=made.samples_per_micro).sent_bytes()
        said[name] = {"step_s": made.step_s, "sent": float(sum(sent))}
    return said, str(choose(workload.HOSTS, spec, cluster, workload.BATCH)), device.cost_per_s


def until_good(side):
    """Return the seconds of training until the model was as good as wanted; None where it never was."""
    return sum(side["epochs"]) if side["accuracy"] and side["accuracy"][-1] >= workload.WANTED else None


def measure(options: Options) -> Result:
    if reason := Lab.why_not():
        raise LaunchError(f"hosts cannot be made here: {reason}")
    rounds = []
    for number in range(max(3, options.rounds or ROUNDS)):
        options.tell(f"round {number + 1}")
        rounds.append(on_hosts(number))
    said, chosen, speed = planned(rounds, workload.data()[0][0][:8])
    seen = [merged(ranks) for ranks in rounds]
    figures = {name: summary(name, seen, said[name]) for name in workload.SIDES}
    columns = (
        "4 hosts x 1 rank, 200 Mbit/s",
        "samples/s",
        "spread",
        f"over {REFERENCE}",
        "MB a batch",
        "forecast",
        "fewer",
        "ms a batch",
        "predicted",
        f"s to {workload.WANTED:.0%}",
        "epochs",
    )
    notes = {
        "MB a batch:": "sent by all hosts together, counted at their interfaces, beside the tensors of the forecast",
        "predicted:": f"by the simulator, with {speed / 1e9:.1f} GFLOP/s a rank as measured with all four at work",
        "the planner:": f"chooses {chosen} of the plans that keep the numbers of one process",
    }
    rows = tuple(row(name, figures) for name in workload.SIDES)
    return Result(columns, rows, tuple(misses(figures)), {"sides": figures, "rounds": rounds}, notes)


def summary(name, seen, said):
    """Return all that is known of a side."""
    speeds = [one[name]["samples/s"] for one in seen]
    return {
        "samples/s": speeds,
        "over": statistics.median(one[name]["samples/s"] / one[REFERENCE]["samples/s"] for one in seen),
        "sent": statistics.median(one[name]["sent"] for one in seen),
        "fewer": 1 - statistics.median(one[name]["sent"] / one[REFERENCE]["sent"] for one in seen),
        "step_s": workload.BATCH / statistics.median(speeds),
        "until_s": [until_good(one[name]) for one in seen],
        "epochs": [len(one[name]["epochs"]) for one in seen],
        "said": said,
    }


def row(name, figures):
    found = figures[name]
    speeds, trains = found["samples/s"], workload.SIDES[name].trains
    reached = [seconds for seconds in found["until_s"] if seconds is not None]
    until = f"{statistics.median(reached):.1f}" if len(reached) == len(found["until_s"]) else "never"
    return (
        name,
        f"{statistics.median(speeds):,.0f}",
        f"{min(speeds):,.0f} to {max(speeds):,.0f}",
        f"{found['over']:.2f}",
        f"{found['sent'] / 1e6:.2f}",
        f"{found['said']['sent'] / 1e6:.2f}",
        f"{found['fewer']:.1%}",
        f"{1e3 * found['step_s']:.0f}",
        f"{1e3 * found['said']['step_s']:.0f}",
        until if trains else "-",
        f"{statistics.median(found['epochs']):.0f}" if trains else "-",
    )


def misses(figures):
    claimed, peer = figures[CLAIMED], figures[PEER]
    if not claimed["over"] >= FASTER:
        yield f"{CLAIMED} is {claimed['over']:.2f} times as fast as {REFERENCE}; at least {FASTER} promised"
    if not claimed["fewer"] >= FEWER:
        yield f"{CLAIMED} sends {claimed['fewer']:.1%} fewer bytes than {REFERENCE}; at least {FEWER:.0%} promised"
    if not 1 / peer["over"] >= LEAST_OF_PEER:
        yield f"{REFERENCE} is {1 / peer['over']:.2f} times as fast as {PEER}; at least {LEAST_OF_PEER} promised"
    for name in (REFERENCE, CLAIMED):
        found = figures[name]
        if None in found["until_s"]:
            yield f"{name} did not come to {workload.WANTED:.0%} in every round"
        if not found["said"]["sent"] <= found["sent"] <= found["said"]["sent"] * (1 + HEADERS):
            yield f"{name} sends {found['sent']:.0f} bytes a batch; {found['said']['sent']:.0f} forecast"
