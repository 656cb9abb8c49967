"""ElasticDL's options as an :class:`ElasticTrainer`: each has the same meaning, or is rejected with the reason.

Synchronous training averages ``grads_to_wait`` minibatch gradients per update: that is a batch of ``grads_to_wait *
minibatch_size`` samples in as many data slices. Gradients of an older version, which ElasticDL recomputes, are not
computed at all. Asynchronous training makes an update of every gradient.

Example:
    >>> import torch
    >>> data = torch.utils.data.TensorDataset(torch.randn(100, 2), torch.randn(100, 1))
    >>> elasticdl(data, minibatch_size=10, grads_to_wait=2).job.consistency
    Bsp(slices_per_step=2)

Source:
    ElasticDL, commit 0cbc361.
"""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack

from counterpoint.data.fetch import MapDataset
from counterpoint.elastic.ps_worker import WorkerConfig
from counterpoint.elastic.sync_policy import SyncPolicy
from counterpoint.errors import PlanError
from counterpoint.optim.validation import require_counts
from counterpoint.ps.job_config import RetryPolicy, Timeouts
from counterpoint.training.elastic_trainer import ElasticTrainer

TASK_RETRIES = 3
"""ElasticDL's ``_MAX_TASK_RETRIES``; after that ElasticDL drops the task, while here the job stops with an error."""


class IgnoredOptions(TypedDict, total=False):
    """Options of ElasticDL whose default has no effect here; most other values are rejected.

    Args:
        lr_staleness_modulation: rejected if true.
        sync_version_tolerance: rejected above 0.
        max_step: rejected above 0.
        relaunch_timeout_worker: ignored: a task whose lease expires is always reassigned.
        distribution_strategy: ``ParameterServerStrategy`` by default; ``AllreduceStrategy`` for training without
            servers.
        num_workers: with ``AllreduceStrategy``, the minibatches per batch, also if the number of workers changes later;
            otherwise ignored.
    """

    lr_staleness_modulation: bool
    sync_version_tolerance: int
    max_step: int
    relaunch_timeout_worker: bool
    distribution_strategy: Literal["ParameterServerStrategy", "AllreduceStrategy", "Local"]
    num_workers: int


def elasticdl(  # noqa: PLR0913 - the options of its command
    dataset: MapDataset,
    *,
    minibatch_size: int,
    num_epochs: int = 1,
    num_minibatches_per_task: int = 8,
    num_ps_pods: int = 1,
    grads_to_wait: int = 1,
    use_async: bool = False,
    get_model_steps: int = 1,
    learning_rate: float = 0.0,
    evaluation_steps: int = 0,
    checkpoint_steps: int = 0,
    task_fault_tolerance: bool = True,
    seed: int = 0,
    job_name: str = "elasticdl",
    **others: Unpack[IgnoredOptions],
) -> ElasticTrainer:
    """Return the job that ``elasticdl train`` would run with these options.

    Args:
        dataset: map-style, instead of a data reader.
        minibatch_size: samples of a minibatch.
        num_epochs: passes over the dataset, at least 1.
        num_minibatches_per_task: of a worker's task with ``use_async``; 1 otherwise.
        num_ps_pods: number of servers.
        grads_to_wait: gradients per update.
        use_async: whether updates are asynchronous.
        get_model_steps: minibatches between pulls of the weights, with ``use_async`` only.
        learning_rate: of a worker's local steps between pulls.
        evaluation_steps: data slices of a worker between evaluations.
        checkpoint_steps: data slices of the job between checkpoints.
        task_fault_tolerance: whether a failed task is retried, at most three times.
        seed: of the sample order, which is random in ElasticDL.
        job_name: of the job.
        **others: see :class:`IgnoredOptions`.

    Raises:
        PlanError: an option has a meaning that is not supported; the error names a replacement.
    """
    require_counts(minibatch_size=minibatch_size, num_minibatches_per_task=num_minibatches_per_task)
    require_counts(num_epochs=num_epochs, num_ps_pods=num_ps_pods, grads_to_wait=grads_to_wait)
    _check_ignored_options(others)
    is_allreduce = _is_allreduce(others, grads_to_wait, use_async=use_async)
    slices_per_step = others.get("num_workers", 1) if is_allreduce else grads_to_wait
    require_counts(num_workers=slices_per_step)
    return ElasticTrainer(
        dataset=dataset,
        batch_size=minibatch_size if use_async else minibatch_size * slices_per_step,
        epochs=num_epochs,
        consistency="asp" if use_async else "bsp",
        slices_per_step=None if use_async else slices_per_step,
        servers=0 if is_allreduce else num_ps_pods,
        slices_per_task=num_minibatches_per_task if use_async else 1,
        sync_policy=_sync_policy(get_model_steps, learning_rate, use_async=use_async),
        worker_config=WorkerConfig(seed=seed, checkpoint_every_slices=checkpoint_steps),
        evaluate_every=evaluation_steps,
        name=job_name,
        retry_policy=RetryPolicy(max_failures=TASK_RETRIES if task_fault_tolerance else 0),
        timeouts=Timeouts(lease_s=300.0),
    )


def _sync_policy(get_model_steps: int, learning_rate: float, *, use_async: bool) -> SyncPolicy:
    require_counts(get_model_steps=get_model_steps)
    if get_model_steps > 1 and not use_async:
        raise PlanError(
            f"get_model_steps={get_model_steps} computes with stale weights, which synchronous training does not "
            "allow; "
            "give use_async=True, or get_model_steps=1"
        )
    return SyncPolicy(pull_every=get_model_steps, local_lr=learning_rate if get_model_steps > 1 else 0.0)


def _check_ignored_options(others: IgnoredOptions) -> None:
    unknown = sorted(others.keys() - IgnoredOptions.__optional_keys__)
    if unknown:
        raise TypeError(f"elasticdl() got an unexpected keyword argument {unknown[0]!r}")
    if others.get("lr_staleness_modulation"):
        raise PlanError(
            "lr_staleness_modulation divides the learning rate by the staleness of a gradient, which servers do "
            "not support; omit it, or bound the staleness with ElasticTrainer(consistency='ssp', staleness=2)"
        )
    if others.get("sync_version_tolerance"):
        raise PlanError(
            f"sync_version_tolerance={others['sync_version_tolerance']} accepts stale gradients in a "
            "synchronous step, so that the result depends on timing; give 0, or bound the staleness with "
            "ElasticTrainer(consistency='ssp', staleness=2)"
        )
    if others.get("max_step"):
        raise PlanError(
            f"max_step={others['max_step']} would skip data, but every sample is trained on; give fewer epochs or "
            "samples"
        )


def _is_allreduce(others: IgnoredOptions, grads_to_wait: int, *, use_async: bool) -> bool:
    """Return whether gradients are all-reduced among workers instead of sent to servers."""
    distribution_strategy = others.get("distribution_strategy", "ParameterServerStrategy")
    if distribution_strategy == "Local":
        raise PlanError("Local trains in one process; use Trainer(strategy='solo'), which needs no servers")
    if distribution_strategy not in {"ParameterServerStrategy", "AllreduceStrategy"}:
        raise PlanError(
            f"unknown distribution_strategy {distribution_strategy!r}; give ParameterServerStrategy or "
            "AllreduceStrategy"
        )
    is_allreduce = distribution_strategy == "AllreduceStrategy"
    if is_allreduce and (use_async or grads_to_wait != 1):
        raise PlanError(
            f"grads_to_wait={grads_to_wait} and use_async={use_async} apply to servers, which AllreduceStrategy does "
            "not "
            "have; give num_workers, the minibatches of a batch, or ParameterServerStrategy"
        )
    return is_allreduce
