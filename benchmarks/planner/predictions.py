"""Predicted step times of plans, from a probe of the machine and a profile of each model; no plan is run."""

import json
import sys
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import median

from cells import WORKLOADS

from counterpoint.errors import LaunchError
from counterpoint.launchers.local import run_command, script_command
from counterpoint.model.model_profile import ModelProfile, parse_profile
from counterpoint.model.spec import ModelSpec
from counterpoint.partitioning.partition import PartitionGranularity, partition_model
from counterpoint.partitioning.partitioned_model import as_call_args
from counterpoint.planner.prepare import resolve_partition
from counterpoint.planner.ranking import predict_plan
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.training.model_partition import assign_unused_params, drop_frozen_params
from counterpoint.training.plan_resolution import MAX_TRACE_SAMPLES, share_params_per_host, trace_model_spec
from counterpoint.world.cluster import Cluster, Level, Link
from counterpoint.world.cluster_file import parse_cluster

SCRIPT = Path(__file__).with_name("profile_model.py")
PROBING = Path(__file__).with_name("probe_machine.py")
MOST_RANKS, PROBE_S = 4, 120
PROBE = (sys.executable, "-m", "counterpoint", "probe", "--json")


@dataclass(frozen=True)
class ModelForPlanning:
    """One model as the planner sees it.

    Args:
        layer_spec: finest layers, by which the planner compares all plans.
        block_spec: blocks, as pipelines split them.
        timing: measured profile.
        reference_step_s: step of the reference loop during the profile, see ranks.py.
        probe_reference_step_s: step of the reference loop during the probe.
    """

    layer_spec: ModelSpec
    block_spec: ModelSpec
    timing: ModelProfile
    reference_step_s: float
    probe_reference_step_s: float

    def spec(self, need: PartitionGranularity):
        """Return the model as the runtime would split it for a plan."""
        return self.block_spec if need == "blocks" else self.layer_spec


def profile_model(letter, cells, probed_s, min_rounds):
    """Return a model's profile for the microbatch sizes of its plans, measured in a separate process."""
    subject = WORKLOADS[letter]()
    sizes = sorted({subject.batch // cell.plan.global_num_microbatches for cell in cells if cell.letter == letter})
    lines = run_and_read(
        script_command(SCRIPT, [letter, json.dumps(sizes), str(min_rounds)]), 1, f"the profile of {letter}"
    )
    told = json.loads(lines[-1])
    model, few = subject.build(), subject.samples[0][:MAX_TRACE_SAMPLES]
    face = OptimizerSpec(subject.optimizer, dict(model.named_parameters()))
    chain = assign_unused_params(
        drop_frozen_params(partition_model(model, as_call_args(few), granularity="blocks").spec, face)
    )
    return ModelForPlanning(
        trace_model_spec(model, face, few, None), chain, parse_profile(told["timing"]), told["beside_s"], probed_s
    )


def probe_machine(num_probes):
    """Return this host as `counterpoint probe` measures it with the most ranks, and reference steps by model.

    Several probes are scaled to the usual speed of the reference loop; the median of every figure is returned.
    """
    lines = run_and_read(script_command(PROBING, [str(num_probes)]), MOST_RANKS, "the probe")
    told = [json.loads(line) for line in lines if line.startswith('{"cluster"')]
    usual_s = {letter: median(one["beside_s"][letter] for one in told) for letter in WORKLOADS}
    found = []
    for one in told:
        factor = median(usual_s[letter] / one["beside_s"][letter] for letter in WORKLOADS)
        found.append(scale_cluster(parse_cluster(one["cluster"]), factor))
    return median_cluster(found), usual_s


def median_cluster(found):
    """Return the cluster with the median of every figure."""
    devices, first = [one.device for one in found], found[0]
    device = replace(
        first.device,
        cost_per_s=median(one.cost_per_s for one in devices),
        memory_bytes_per_s=median(one.memory_bytes_per_s for one in devices),
    )
    links = [[level.link for level in one.levels] for one in found]
    levels = tuple(
        replace(
            level,
            link=replace(
                level.link,
                latency_s=median(one.latency_s for one in own),
                bytes_per_s=median(one.bytes_per_s for one in own),
            ),
        )
        for level, own in zip(first.levels, zip(*links, strict=True), strict=True)
    )
    contention = {
        name: tuple(map(median, zip(*(getattr(one, name) for one in found), strict=True)))
        for name in ("compute_contention", "memory_contention")
    }
    slicings = [one.time_slicing for one in found]
    fractions = tuple(map(median, zip(*(one.speed_fractions for one in slicings), strict=True)))
    message_s = median(one.message_s for one in slicings)
    time_slicing = replace(first.time_slicing, speed_fractions=fractions, message_s=message_s)
    return replace(first, device=device, levels=levels, time_slicing=time_slicing, **contention)


def run_and_read(command, ranks, what):
    """Return the lines printed by rank 0 of a command; ranks retain freed memory, as those of a plan do."""
    lines = []
    result = run_command(command, ranks, threads_per_rank=1, on_line=lines.append)
    if result.exit_code:
        texts = "\n".join(line.text for line in lines[-12:])
        raise LaunchError(f"{what} ended with {result.exit_code}: {result.report}\n{texts}")
    return [line.text for line in lines if line.rank == 0 and line.stream == "out"]


def lab_level(lab):
    """Return the network between simulated hosts as `counterpoint probe` measures it."""
    found = json.loads(lab.run_ranks(PROBE, deadline_s=PROBE_S)[0].text())
    network = parse_cluster(found["cluster"]).levels[-1]
    return Level("lab", network.count, network.link)


def cluster_of_lab(level: Level, here: Cluster):
    """Return the cluster of simulated hosts: each has one rank and a NIC, and all share the cores of one machine.

    For predictions they are the ranks of one host, connected by a network instead of memory.
    """
    return replace(here, levels=(level,), speeds=())


def with_explicit_split(cell, found: ModelForPlanning, cluster: Cluster):
    """Return a cell with explicit split points, as the planner chooses them from the profile."""
    plan, batch = cell.plan, WORKLOADS[cell.letter]().batch
    settled = resolve_partition(plan, found.spec(plan.granularity), cluster, batch_size=batch, profile=found.timing)
    return replace(cell, strategy=str(settled))


def predict_step_s(cell, found: ModelForPlanning, cluster: Cluster):
    """Return the predicted step time of the plan that runs, in which replicas of a host share parameters."""
    plan = cell.plan
    if cluster.link_among((0, 1)).is_shared_memory:
        plan = share_params_per_host(plan, [0] * cell.ranks)
    batch = WORKLOADS[cell.letter]().batch
    return predict_plan(plan, found.spec(plan.granularity), cluster, batch_size=batch, profile=found.timing).step_s


def with_contention(cluster: Cluster, lap):
    """Return the cluster with the contention measured around a lap.

    Args:
        cluster: the machine.
        lap: see measurements.py.
    """
    fractions, message_s = monotone(lap["turns"]), lap["message_s"]
    return replace(
        cluster,
        compute_contention=monotone(lap["crowd"]),
        memory_contention=monotone(lap["memory_crowd"]),
        time_slicing=replace(cluster.time_slicing, speed_fractions=fractions, message_s=message_s),
    )


def monotone(parts):
    """Return fractions limited to 1 and made non-increasing."""
    return tuple(accumulate((min(1.0, part) for part in parts), min))


def at_measured_speed(found: ModelForPlanning, cluster: Cluster, beside_s):
    """Return profile and cluster scaled to the speed at which a reference step took this long."""
    timing = found.timing.scale(beside_s / found.reference_step_s)
    return replace(found, timing=timing), scale_cluster(cluster, beside_s / found.probe_reference_step_s)


def scale_cluster(cluster: Cluster, factor):
    """Return the cluster with all times multiplied by a factor.

    Copies by the ranks' cores are scaled like computing; network links are not.
    """
    device = replace(cluster.device, memory_bytes_per_s=cluster.device.memory_bytes_per_s / factor)
    levels = tuple(replace(level, link=scale_link(level.link, factor)) for level in cluster.levels)
    time_slicing = replace(cluster.time_slicing, message_s=factor * cluster.time_slicing.message_s)
    return replace(cluster, device=device, levels=levels, time_slicing=time_slicing)


def scale_link(link: Link, factor):
    """Return a shared-memory link with its times multiplied by a factor; a network link unchanged."""
    if not link.is_shared_memory:
        return link
    return replace(link, latency_s=factor * link.latency_s, bytes_per_s=link.bytes_per_s / factor)
