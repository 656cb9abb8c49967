"""A launch on Kubernetes: manifests of an Indexed Job, of a JobSet, or of Kubeflow Trainer's TrainJob.

In each of them a pod is a host, and torchrun starts its ranks: PET_ variables are torchrun's own options. The job's key
is a secret that is made from its file and mounted as a file; neither a manifest nor a command has the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import yaml

from counterpoint.errors import LaunchError
from counterpoint.launchers.description import Launch, Written

Json: TypeAlias = "int | str | bool | list[Json] | Mapping[str, Json]"
Manifest: TypeAlias = Mapping[str, Json]

KEY_FOLDER = "/run/secrets/counterpoint"
KEY_NAME = "key"
RANKS = "node"  # what Kubeflow Trainer calls the pods that train, and their container
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
PROBE_S = 20
TRAINER = "trainer.kubeflow.org"
PULLING_S = 600  # so long ranks may take to start after their container has


def on_kubernetes(launch: Launch) -> Written:
    """Return an Indexed Job and the headless service by which its pods find each other.

    A pod that ends with an error is started again; its ranks' peers fail with it, and start again likewise.
    """
    return written(launch, [service(launch), job(launch)])


def on_jobset(launch: Launch) -> Written:
    """Return a JobSet: where a pod fails, all are started again together."""
    return written(launch, [job_set(launch)])


def on_kubeflow(launch: Launch) -> Written:
    """Return a TrainJob, and the TrainingRuntime of its own that says what pods look like."""
    return written(launch, [training_runtime(launch), train_job(launch)])


def written(launch: Launch, manifests: list[Manifest]) -> Written:
    """Return the file with the manifests, and the commands that hand over the key and them.

    Raises:
        LaunchError: no image is given, or names of hosts, which Kubernetes chooses.
    """
    if not launch.image:
        raise LaunchError("a pod needs an image that has this package and the script; give --image NAME")
    if launch.host_names:
        raise LaunchError(f"Kubernetes chooses the hosts itself, and {', '.join(launch.host_names)} are named")
    file = f"{launch.name}.yaml"
    text = "---\n".join(yaml.safe_dump(manifest, sort_keys=False, width=120) for manifest in manifests)
    commands: list[tuple[str, ...]] = [("kubectl", "apply", "-f", file)]
    if launch.key_file is not None:
        secret = ("kubectl", "create", "secret", "generic", secret_of(launch))
        commands.insert(0, (*secret, f"--from-file={KEY_NAME}={launch.key_file}"))
    return Written(((file, text),), tuple(commands))


def service(launch: Launch) -> Manifest:
    """Return the service that gives pods names before they are ready, since they are not before they have met."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(launch),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": launch.name},
        },
    }


def job(launch: Launch) -> Manifest:
    """Return the Indexed Job."""
    spec = job_spec(
        launch, f"{launch.name}-0.{launch.name}", launch.restarts * launch.hosts, {"subdomain": launch.name}
    )
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(launch), "spec": spec}


def job_set(launch: Launch) -> Manifest:
    """Return the JobSet; pods are named after the set, the job, the job's number and their own."""
    first = f"{launch.name}-{RANKS}-0-0.{launch.name}"
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(launch),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": launch.name},
            "failurePolicy": {"maxRestarts": launch.restarts},
            "replicatedJobs": [{"name": RANKS, "replicas": 1, "template": {"spec": job_spec(launch, first, 0, {})}}],
        },
    }


def training_runtime(launch: Launch) -> Manifest:
    """Return what pods of the TrainJob look like; Kubeflow's controller adds how many, and where they meet."""
    labels: Manifest = {f"{TRAINER}/trainjob-ancestor-step": "trainer"}
    template: Manifest = {
        "metadata": {"labels": labels},
        "spec": {"backoffLimit": 0, "template": {"spec": pod(launch, [])}},
    }
    return {
        "apiVersion": f"{TRAINER}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": metadata(launch),
        "spec": {
            "mlPolicy": {"numNodes": launch.hosts, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": launch.restarts},
                    "network": {"publishNotReadyAddresses": True},
                    "replicatedJobs": [{"name": RANKS, "template": template}],
                }
            },
        },
    }


def train_job(launch: Launch) -> Manifest:
    """Return the TrainJob."""
    return {
        "apiVersion": f"{TRAINER}/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata(launch),
        "spec": {
            "runtimeRef": {"apiGroup": TRAINER, "kind": "TrainingRuntime", "name": launch.name},
            "trainer": {
                "image": launch.image,
                "command": command(launch),
                "numNodes": launch.hosts,
                "numProcPerNode": launch.ranks_per_host,
                "resourcesPerNode": resources(launch),
            },
        },
    }


def job_spec(launch: Launch, first: str, retries: int, names: Manifest) -> Manifest:
    """Return the job of all pods.

    Args:
        launch: what they run.
        first: the name under which the others find the pod of rank 0.
        retries: how many pods may fail in all.
        names: what gives pods their names, where the job has to say it itself.
    """
    meeting: list[Json] = [
        variable("PET_NNODES", launch.hosts),
        variable("PET_NPROC_PER_NODE", launch.ranks_per_host),
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}},
        variable("PET_MASTER_ADDR", first),
        variable("PET_MASTER_PORT", launch.port),
    ]
    spec: dict[str, Json] = {
        "completionMode": "Indexed",
        "completions": launch.hosts,
        "parallelism": launch.hosts,
        "backoffLimit": retries,
        "template": {"spec": {**names, **pod(launch, meeting)}},
    }
    if launch.needs.minutes:
        spec["activeDeadlineSeconds"] = 60 * launch.needs.minutes
    return spec


def pod(launch: Launch, meeting: list[Json]) -> Manifest:
    """Return a pod: one container with all ranks of a host, memory that they share, and the key where there is one."""
    mounts: list[Json] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes: list[Json] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    own = launch
    if launch.key_file is not None:
        own = replace(launch, key_file=Path(KEY_FOLDER) / KEY_NAME)
        mounts.append({"name": "job-key", "mountPath": KEY_FOLDER, "readOnly": True})
        volumes.append({"name": "job-key", "secret": {"secretName": secret_of(launch), "defaultMode": 0o400}})
    container: Manifest = {
        "name": RANKS,
        "image": launch.image,
        "command": command(launch),
        "env": [*meeting, *(variable(name, value) for name, value in own.variables().items())],
        "resources": resources(launch),
        "startupProbe": {**ask(launch), "failureThreshold": PULLING_S // PROBE_S},
        "livenessProbe": {**ask(launch), "failureThreshold": 3},
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": launch.needs.grace_s,
        "containers": [container],
        "volumes": volumes,
    }


def ask(launch: Launch) -> Manifest:
    """Return how a kubelet asks whether the ranks of a pod live."""
    words: list[Json] = [launch.python, "-m", "counterpoint.launchers.alive", str(launch.ranks_per_host)]
    return {"exec": {"command": words}, "periodSeconds": PROBE_S, "timeoutSeconds": PROBE_S}


def command(launch: Launch) -> list[Json]:
    """Return the command of a container."""
    return [launch.python, "-m", "torch.distributed.run", launch.script, *launch.arguments]


def resources(launch: Launch) -> Manifest:
    """Return what a pod asks for and may use at most."""
    needs, ranks = launch.needs, launch.ranks_per_host
    wanted: dict[str, Json] = {"cpu": str(ranks * needs.cpus_per_rank)}
    if needs.memory_gib:
        wanted["memory"] = f"{needs.memory_gib}Gi"
    if needs.gpus_per_rank:
        wanted["nvidia.com/gpu"] = str(ranks * needs.gpus_per_rank)
    return {"requests": dict(wanted), "limits": dict(wanted)}


def metadata(launch: Launch) -> Manifest:
    """Return the name and the labels of all that belongs to a launch."""
    return {"name": launch.name, "labels": {"app.kubernetes.io/managed-by": "counterpoint"}}


def variable(name: str, value: object) -> Manifest:
    """Return a variable of a container."""
    return {"name": name, "value": str(value)}


def secret_of(launch: Launch) -> str:
    """Return the name of the secret with the job's key."""
    return f"{launch.name}-key"
