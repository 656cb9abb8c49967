"""A VGG on four simulated hosts under pipelines and data parallelism, compared with the planner's predictions."""

import json
import statistics
import sys
from pathlib import Path

from counterpoint.compiler.compile import compile as compiled
from counterpoint.errors import LaunchError
from counterpoint.partitioning.partition import partition_model
from counterpoint.partitioning.partitioned_model import as_call_args
from counterpoint.plan.plan import Plan
from counterpoint.planner.choose import choose_plan
from counterpoint.planner.ranking import predict_plan
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult
from counterpoint.training.plan_resolution import DEFAULT_PASSES, trace_model_spec
from counterpoint.world.cluster import Cluster, Device, Link

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lab import Lab
from benchmarks.lab.network import bytes_per_s
from benchmarks.vgg import workload

ROUNDS, MAX_EPOCHS, RATE, LATENCY_S = 3, 20, "200mbit", 100e-6
REFERENCE, CLAIMED, PEER = "data(4)", "pipedream(4)", "DDP on gloo"
MIN_SPEEDUP, MIN_BYTES_SAVED, MIN_OF_PEER = 3.0, 0.85, 1.0
HEADER_OVERHEAD = 0.10  # of frames, acknowledgements and message headers, relative to the bytes of the tensors
BACKWARD = 2  # cost of a backward in forwards, as in the simulator


def on_hosts(number, max_epochs):
    """Return the results of each rank in a round."""
    command = [sys.executable, str(Path(__file__).with_name("ranks.py")), str(number), str(max_epochs)]
    with Lab(hosts=workload.HOSTS, rate=RATE) as lab:
        return [json.loads(one.text().splitlines()[-1]) for one in lab.run_ranks(command, deadline_s=240)]


def merge_ranks(ranks):
    """Return the results of a round: seconds until the last rank has finished, bytes of all hosts."""
    found = {}
    for name in workload.CONTENDERS:
        seen = [rank["sides"][name] for rank in ranks]
        found[name] = {
            "samples/s": workload.STEPS * workload.BATCH / max(one["seconds"] for one in seen),
            "sent": sum(one["sent"] for one in seen) / workload.STEPS,
            "epochs": [max(times) for times in zip(*(one.get("epochs", []) for one in seen), strict=True)],
            "accuracy": seen[0].get("accuracy", []),
        }
    return found


def predict_contenders(rounds, images):
    """Return the predicted step of each contender, the plan that the planner would choose, and the ranks' speed."""
    model = workload.build_vgg()
    face = OptimizerSpec(workload.CONTENDERS[REFERENCE].optimizer, dict(model.named_parameters()))
    spec = trace_model_spec(model, face, images, None)
    alone = (zip(*(one["alone"] for one in ranks), strict=True) for ranks in rounds)
    alone_s = statistics.median(max(times) for turns in alone for times in turns)
    cost = sum(block.cost for block in spec.blocks) * workload.BATCH
    device = Device(cost_per_s=(1 + BACKWARD) * cost / alone_s)
    cluster = Cluster(device, Link(LATENCY_S, bytes_per_s(RATE)))
    said = {}
    for name, side in workload.CONTENDERS.items():
        plan = Plan.parse(side.strategy or REFERENCE, num_microbatches=side.num_microbatches)
        cut = partition_model(model, as_call_args(images), granularity=plan.granularity).spec
        made = predict_plan(
            Plan(plan.strategies, plan.num_microbatches, DEFAULT_PASSES),
            cut,
            cluster,
            batch_size=workload.BATCH,
        )
        sent = compiled(plan, cut, samples_per_micro=made.samples_per_microbatch).sent_bytes()
        said[name] = {"step_s": made.step_s, "sent": float(sum(sent))}
    return said, str(choose_plan(workload.HOSTS, spec, cluster, workload.BATCH)), device.cost_per_s


def seconds_to_accuracy(side):
    """Return the seconds of training until the target accuracy; None if it was not reached."""
    return sum(side["epochs"]) if side["accuracy"] and side["accuracy"][-1] >= workload.TARGET_ACCURACY else None


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    if reason := Lab.unavailable_reason():
        raise LaunchError(f"simulated hosts are not available: {reason}")
    rounds = []
    for number in range(options.num_rounds(ROUNDS)):
        options.report_progress(f"round {number + 1}")
        rounds.append(on_hosts(number, 1 if options.is_quick else MAX_EPOCHS))
    said, chosen, speed = predict_contenders(rounds, workload.load_data()[0][0][:8])
    seen = [merge_ranks(ranks) for ranks in rounds]
    figures = {name: summarize(name, seen, said[name]) for name in workload.CONTENDERS}
    columns = (
        "4 hosts x 1 rank, 200 Mbit/s",
        "samples/s",
        "spread",
        f"over {REFERENCE}",
        "MB per batch",
        "forecast",
        "fewer",
        "ms per batch",
        "predicted",
        f"s to {workload.TARGET_ACCURACY:.0%}",
        "epochs",
    )
    notes = {
        "MB per batch:": "sent by all hosts, counted at their interfaces; the forecast has the tensors only",
        "predicted:": f"by the simulator, with {speed / 1e9:.1f} GFLOP/s per rank, measured with all four running",
        "the planner:": f"chooses {chosen} among the plans equivalent to single-process training",
    }
    rows = tuple(make_row(name, figures) for name in workload.CONTENDERS)
    return BenchmarkResult(columns, rows, tuple(find_misses(figures)), {"sides": figures, "rounds": rounds}, notes)


def summarize(name, seen, said):
    """Return all results of a contender."""
    speeds = [one[name]["samples/s"] for one in seen]
    return {
        "samples/s": speeds,
        "over": statistics.median(one[name]["samples/s"] / one[REFERENCE]["samples/s"] for one in seen),
        "sent": statistics.median(one[name]["sent"] for one in seen),
        "fewer": 1 - statistics.median(one[name]["sent"] / one[REFERENCE]["sent"] for one in seen),
        "step_s": workload.BATCH / statistics.median(speeds),
        "until_s": [seconds_to_accuracy(one[name]) for one in seen],
        "epochs": [len(one[name]["epochs"]) for one in seen],
        "said": said,
    }


def make_row(name, figures):
    found = figures[name]
    speeds, trains = found["samples/s"], workload.CONTENDERS[name].trains
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


def find_misses(figures):
    claimed, peer = figures[CLAIMED], figures[PEER]
    if not claimed["over"] >= MIN_SPEEDUP:
        yield f"{CLAIMED} is {claimed['over']:.2f} times as fast as {REFERENCE}; at least {MIN_SPEEDUP} required"
    if not claimed["fewer"] >= MIN_BYTES_SAVED:
        yield f"{CLAIMED} sends {claimed['fewer']:.1%} fewer bytes than {REFERENCE}; {MIN_BYTES_SAVED:.0%} required"
    if not 1 / peer["over"] >= MIN_OF_PEER:
        yield f"{REFERENCE} is {1 / peer['over']:.2f} times as fast as {PEER}; at least {MIN_OF_PEER} required"
    for name in (REFERENCE, CLAIMED):
        found = figures[name]
        if None in found["until_s"]:
            yield f"{name} did not reach {workload.TARGET_ACCURACY:.0%} in every round"
        if not found["said"]["sent"] <= found["sent"] <= found["said"]["sent"] * (1 + HEADER_OVERHEAD):
            yield f"{name} sends {found['sent']:.0f} bytes a batch; {found['said']['sent']:.0f} forecast"
