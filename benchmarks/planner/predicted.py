"""What is predicted of plans, from a probe of the machine and a profile of each model, no plan of either measured."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from cells import SUBJECTS

from counterpoint.cutting.choose import Need, cut_model
from counterpoint.errors import LaunchError
from counterpoint.launchers.local import run_command, script_command
from counterpoint.model.spec import ModelSpec
from counterpoint.model.timing import Timing
from counterpoint.model.timing_file import read_timing
from counterpoint.planner.given import settle
from counterpoint.planner.rank import predict
from counterpoint.runtime.build import call_form
from counterpoint.runtime.optimizers import Face
from counterpoint.training.choice import FEW_SAMPLES, trace_spec
from counterpoint.training.one_copy import with_one_copy
from counterpoint.training.trained import trainable, with_unused
from counterpoint.world.cluster import Cluster, Level
from counterpoint.world.cluster_file import read_cluster

SCRIPT = Path(__file__).with_name("profiled.py")
MOST_RANKS, PROBE_S = 4, 120
PROBE = (sys.executable, "-m", "counterpoint", "probe", "--json")


@dataclass(frozen=True)
class Profiled:
    """One model as the planner sees it.

    Args:
        finest: its pieces as the planner compares all plans by them.
        chain: its pieces as pipelines have them.
        timing: what they take.
        beside_s: what a step of one process took meanwhile, see ranks.py.
    """

    finest: ModelSpec
    chain: ModelSpec
    timing: Timing
    beside_s: float

    def spec(self, need: Need):
        """Return the pieces as the runtime would cut them for a plan."""
        return self.chain if need == "chain" else self.finest


def profiled(letter, cells):
    """Return a model's profile, for the sizes of microbatches that its cells have; it runs in a process of its own."""
    subject = SUBJECTS[letter]()
    sizes = sorted({subject.batch // cell.plan.num_micros for cell in cells if cell.letter == letter})
    lines = told_by(script_command(SCRIPT, [letter, json.dumps(sizes)]), 1, f"the profile of {letter}")
    told = json.loads(lines[-1])
    model, few = subject.build(), subject.samples[0][:FEW_SAMPLES]
    face = Face(subject.optimizer, dict(model.named_parameters()))
    chain = with_unused(trainable(cut_model(model, call_form(few), need="chain").spec, face))
    return Profiled(trace_spec(model, face, few, None), chain, read_timing(told["timing"]), told["beside_s"])


def probed():
    """Return this host as `counterpoint probe` finds it, with as many ranks as any plan here has."""
    return read_cluster(json.loads("\n".join(told_by(PROBE, MOST_RANKS, "the probe")))["cluster"])


def told_by(command, ranks, what):
    """Return the lines that rank 0 of a command prints; ranks keep the memory that they free, as those of a plan do."""
    lines = []
    result = run_command(command, ranks, threads_per_rank=1, on_line=lines.append)
    if result.exit_code:
        texts = "\n".join(line.text for line in lines[-12:])
        raise LaunchError(f"{what} ended with {result.exit_code}: {result.report}\n{texts}")
    return [line.text for line in lines if line.rank == 0 and line.stream == "out"]


def lab_cluster(lab, here):
    """Return the hosts of a lab, as `counterpoint probe` on them finds their network.

    They have the cores of one machine, and each has one rank and a card of its own: so for predictions they are the
    ranks of one host, joined by a network instead of memory.
    """
    found = json.loads(lab.run_ranks(PROBE, deadline_s=PROBE_S)[0].text())
    network = read_cluster(found["cluster"]).levels[-1]
    return Cluster(here.device, levels=(Level("lab", network.count, network.link),), crowding=here.crowding)


def as_it_runs(cell, found: Profiled, cluster: Cluster):
    """Return a cell with its cuts written out, as the planner makes them of the profile: those are what is measured."""
    plan, batch = cell.plan, SUBJECTS[cell.letter]().batch
    settled = settle(plan, found.spec(plan.need), cluster, batch_size=batch, timing=found.timing)
    return replace(cell, strategy=str(settled))


def step_s(cell, found: Profiled, cluster: Cluster):
    """Return what the planner says of a step of the plan that runs where replicas of a host share a copy."""
    plan = cell.plan
    if cluster.link_among((0, 1)).is_copied:
        plan = with_one_copy(plan, [0] * cell.ranks)
    batch = SUBJECTS[cell.letter]().batch
    return predict(plan, found.spec(plan.need), cluster, batch_size=batch, timing=found.timing).step_s


def crowded(cluster: Cluster, ranks, slowdown):
    """Return the machine as it is while a step that each of so many ranks takes at once is so many times slower."""
    if ranks == 1:
        return cluster
    most = range(1, max(len(cluster.crowding), ranks) + 1)
    return replace(cluster, crowding=tuple(min(1.0, ranks / max(1.0, slowdown) / count) for count in most))


def calmed(found: Profiled, beside_s):
    """Return the profile as it would have been while a step of one process took so long."""
    return replace(found, timing=found.timing.at_speed(beside_s / found.beside_s), beside_s=beside_s)
