"""Kubernetes manifests: an Indexed Job, a JobSet, or Kubeflow Trainer's TrainJob.

In each of them a pod is a host, and torchrun starts its ranks, configured by PET_ variables. The job's key is a secret
created from its file and mounted as a file; neither manifests nor commands contain it. Pods meet the restricted Pod
Security Standard: they run as a user without privileges, and can write to their shared memory and to /tmp only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import yaml

from counterpoint.errors import LaunchError
from counterpoint.launchers.targets.spec import LaunchArtifacts, LaunchSpec

Json: TypeAlias = "int | str | bool | list[Json] | Mapping[str, Json]"
KubernetesManifest: TypeAlias = Mapping[str, Json]

KEY_FOLDER = "/run/secrets/counterpoint"
KEY_NAME = "key"
USER_ID = 1000  # of the pod's processes, and of the group that may read the secret
HOME = "/tmp"
CONTAINER = "node"  # Kubeflow Trainer's name of the training pods and their container
INDEX_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
PROBE_S = 20
TRAINER_API = "trainer.kubeflow.org"
STARTUP_S = 600  # for ranks to start after their container


def render_kubernetes(spec: LaunchSpec) -> LaunchArtifacts:
    """Render an Indexed Job, and the headless service through which its pods find each other.

    A pod that fails is restarted; its ranks' peers fail with it, and are restarted likewise.
    """
    return render_manifests(spec, [service(spec), job(spec)])


def render_jobset(spec: LaunchSpec) -> LaunchArtifacts:
    """Render a JobSet: if a pod fails, all are restarted together."""
    return render_manifests(spec, [job_set(spec)])


def render_kubeflow(spec: LaunchSpec) -> LaunchArtifacts:
    """Render a TrainJob, and its TrainingRuntime, which specifies the pods."""
    return render_manifests(spec, [training_runtime(spec), train_job(spec)])


def render_manifests(spec: LaunchSpec, manifests: list[KubernetesManifest]) -> LaunchArtifacts:
    """Render the file with the manifests, and the commands that create the secret and apply the file.

    Raises:
        LaunchError: no image, or host names, which Kubernetes chooses.
    """
    if not spec.image:
        raise LaunchError("a pod needs an image that has this package and the script; give --image NAME")
    if spec.host_names:
        raise LaunchError(f"Kubernetes chooses the hosts itself, and {', '.join(spec.host_names)} are named")
    file = f"{spec.name}.yaml"
    text = "---\n".join(yaml.safe_dump(manifest, sort_keys=False, width=120) for manifest in manifests)
    commands: list[tuple[str, ...]] = [("kubectl", "apply", "-f", file)]
    if spec.key_file is not None:
        secret = ("kubectl", "create", "secret", "generic", secret_name(spec))
        commands.insert(0, (*secret, f"--from-file={KEY_NAME}={spec.key_file}"))
    return LaunchArtifacts(((file, text),), tuple(commands))


def service(spec: LaunchSpec) -> KubernetesManifest:
    """Return the service that gives pods names before they are ready; they become ready only after the rendezvous."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(spec),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": spec.name},
        },
    }


def job(spec: LaunchSpec) -> KubernetesManifest:
    """Return the Indexed Job."""
    body = job_spec(spec, f"{spec.name}-0.{spec.name}", spec.max_restarts * spec.num_hosts, {"subdomain": spec.name})
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(spec), "spec": body}


def job_set(spec: LaunchSpec) -> KubernetesManifest:
    """Return the JobSet; a pod's name consists of the set's, the job's, the job's index and its own index."""
    first = f"{spec.name}-{CONTAINER}-0-0.{spec.name}"
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(spec),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": spec.name},
            "failurePolicy": {"maxRestarts": spec.max_restarts},
            "replicatedJobs": [{"name": CONTAINER, "replicas": 1, "template": {"spec": job_spec(spec, first, 0, {})}}],
        },
    }


def training_runtime(spec: LaunchSpec) -> KubernetesManifest:
    """Return the pods of the TrainJob; Kubeflow's controller adds their number and the rendezvous address."""
    labels: KubernetesManifest = {f"{TRAINER_API}/trainjob-ancestor-step": "trainer"}
    template: KubernetesManifest = {
        "metadata": {"labels": labels},
        "spec": {"backoffLimit": 0, "template": {"spec": pod(spec, [])}},
    }
    return {
        "apiVersion": f"{TRAINER_API}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": metadata(spec),
        "spec": {
            "mlPolicy": {"numNodes": spec.num_hosts, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": spec.max_restarts},
                    "network": {"publishNotReadyAddresses": True},
                    "replicatedJobs": [{"name": CONTAINER, "template": template}],
                }
            },
        },
    }


def train_job(spec: LaunchSpec) -> KubernetesManifest:
    """Return the TrainJob."""
    return {
        "apiVersion": f"{TRAINER_API}/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata(spec),
        "spec": {
            "runtimeRef": {"apiGroup": TRAINER_API, "kind": "TrainingRuntime", "name": spec.name},
            "trainer": {
                "image": spec.image,
                "command": command(spec),
                "numNodes": spec.num_hosts,
                "numProcPerNode": spec.ranks_per_host,
                "resourcesPerNode": resources(spec),
            },
        },
    }


def job_spec(spec: LaunchSpec, master_host: str, retries: int, names: KubernetesManifest) -> KubernetesManifest:
    """Return the job of all pods.

    Args:
        spec: the launch.
        master_host: DNS name of the pod of rank 0.
        retries: how many pods may fail in total.
        names: fields that give pods DNS names, if the job has to specify them.
    """
    meeting: list[Json] = [
        env_variable("PET_NNODES", spec.num_hosts),
        env_variable("PET_NPROC_PER_NODE", spec.ranks_per_host),
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX_FIELD}}},
        env_variable("PET_MASTER_ADDR", master_host),
        env_variable("PET_MASTER_PORT", spec.port),
    ]
    body: dict[str, Json] = {
        "completionMode": "Indexed",
        "completions": spec.num_hosts,
        "parallelism": spec.num_hosts,
        "backoffLimit": retries,
        "template": {"spec": {**names, **pod(spec, meeting)}},
    }
    if spec.resources.minutes:
        body["activeDeadlineSeconds"] = 60 * spec.resources.minutes
    return body


def pod(spec: LaunchSpec, master_variables: list[Json]) -> KubernetesManifest:
    """Return a pod: one container with all ranks of a host, shared memory, and the key if there is one."""
    mounts: list[Json] = [
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        {"name": "temporary-files", "mountPath": HOME},
    ]
    volumes: list[Json] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        {"name": "temporary-files", "emptyDir": {}},
    ]
    own = spec
    if spec.key_file is not None:
        own = replace(spec, key_file=Path(KEY_FOLDER) / KEY_NAME)
        mounts.append({"name": "job-key", "mountPath": KEY_FOLDER, "readOnly": True})
        volumes.append({"name": "job-key", "secret": {"secretName": secret_name(spec), "defaultMode": 0o440}})
    # torch asks for the home and the name of the user, which the image does not know
    variables = {"HOME": HOME, "USER": "counterpoint", **own.env_variables()}
    container: KubernetesManifest = {
        "name": CONTAINER,
        "image": spec.image,
        "command": command(spec),
        "env": [*master_variables, *(env_variable(name, value) for name, value in variables.items())],
        "resources": resources(spec),
        "startupProbe": {**liveness_probe(spec), "failureThreshold": STARTUP_S // PROBE_S},
        "livenessProbe": {**liveness_probe(spec), "failureThreshold": 3},
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": spec.resources.grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }


def liveness_probe(spec: LaunchSpec) -> KubernetesManifest:
    """Return the command with which a kubelet checks the ranks of a pod."""
    command_: list[Json] = [spec.python, "-m", "counterpoint.launchers.liveness_probe", str(spec.ranks_per_host)]
    return {"exec": {"command": command_}, "periodSeconds": PROBE_S, "timeoutSeconds": PROBE_S}


def command(spec: LaunchSpec) -> list[Json]:
    """Return the command of a container."""
    return [spec.python, "-m", "torch.distributed.run", spec.script, *spec.arguments]


def resources(spec: LaunchSpec) -> KubernetesManifest:
    """Return the resource requests and limits of a pod."""
    needs, ranks = spec.resources, spec.ranks_per_host
    wanted: dict[str, Json] = {"cpu": str(ranks * needs.cpus_per_rank)}
    if needs.memory_gib:
        wanted["memory"] = f"{needs.memory_gib}Gi"
    if needs.gpus_per_rank:
        wanted["nvidia.com/gpu"] = str(ranks * needs.gpus_per_rank)
    return {"requests": dict(wanted), "limits": dict(wanted)}


def metadata(spec: LaunchSpec) -> KubernetesManifest:
    """Return the name and labels of the launch's objects."""
    return {"name": spec.name, "labels": {"app.kubernetes.io/managed-by": "counterpoint"}}


def env_variable(name: str, value: object) -> KubernetesManifest:
    """Return an environment variable of a container."""
    return {"name": name, "value": str(value)}


def secret_name(spec: LaunchSpec) -> str:
    """Return the name of the secret with the job's key."""
    return f"{spec.name}-key"
