"""ElasticDL's options as an elastic job: each one means what it means there, or is refused with the reason.

Synchronous training averages ``grads_to_wait`` gradients of a minibatch and updates once: that is a batch of
``grads_to_wait * minibatch_size`` samples in as many portions, and a gradient of an older version, which ElasticDL has
computed again, is not computed in the first place. Asynchronous training makes every gradient an update.

Example:
    >>> import torch
    >>> data = torch.utils.data.TensorDataset(torch.randn(100, 2), torch.randn(100, 1))
    >>> elasticdl(data, minibatch_size=10, grads_to_wait=2).consistency
    'bsp(2)'

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
"""ElasticDL's ``_MAX_TASK_RETRIES``; there the task is dropped then, here the job stops and says why."""


class IgnoredOptions(TypedDict, total=False):
    """Options of ElasticDL that change nothing as they are there by default; most are refused otherwise.

    Args:
        lr_staleness_modulation: refused where it is set.
        sync_version_tolerance: refused above 0.
        max_step: refused above 0.
        relaunch_timeout_worker: makes no difference: a task whose lease is over is given to others in any case.
        distribution_strategy: ``ParameterServerStrategy`` by default; ``AllreduceStrategy`` to have no servers.
        num_workers: with ``AllreduceStrategy``, how many minibatches are a batch, however many workers there are later;
            makes no difference otherwise.
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
        dataset: map-style, in place of a data reader.
        minibatch_size: samples of a minibatch.
        num_epochs: passes over the dataset; from 1, there is no infinite one.
        num_minibatches_per_task: that a worker is given at once, with ``use_async``; 1 without.
        num_ps_pods: servers.
        grads_to_wait: gradients of an update.
        use_async: whether nobody waits for anybody.
        get_model_steps: minibatches from one fetch of the weights to the next; with ``use_async`` only.
        learning_rate: of the steps that a worker makes by itself meanwhile.
        evaluation_steps: portions of a worker from one evaluation to the next.
        checkpoint_steps: portions of the job from one checkpoint to the next.
        task_fault_tolerance: whether a task that fails is given again, three times at most.
        seed: of the order of samples, which ElasticDL leaves to chance.
        job_name: of the job.
        **others: options that are left out where they change nothing, see :class:`Others`.

    Raises:
        PlanError: an option means something that is not done here; the error says what to write.
    """
    require_counts(minibatch_size=minibatch_size, num_minibatches_per_task=num_minibatches_per_task)
    require_counts(num_epochs=num_epochs, num_ps_pods=num_ps_pods, grads_to_wait=grads_to_wait)
    _check_ignored_options(others)
    is_allreduce = _is_allreduce(others, grads_to_wait, use_async=use_async)
    parts = others.get("num_workers", 1) if is_allreduce else grads_to_wait
    require_counts(num_workers=parts)
    return ElasticTrainer(
        dataset=dataset,
        batch_size=minibatch_size if use_async else minibatch_size * parts,
        epochs=num_epochs,
        consistency="asp" if use_async else f"bsp({parts})",
        servers=0 if is_allreduce else num_ps_pods,
        slices_per_task=num_minibatches_per_task if use_async else 1,
        sync_policy=_sync_policy(get_model_steps, learning_rate, use_async=use_async),
        worker_config=WorkerConfig(seed=seed, checkpoint_every_slices=checkpoint_steps),
        evaluate_every=evaluation_steps,
        name=job_name,
        budget=RetryPolicy(max_failures=TASK_RETRIES if task_fault_tolerance else 0),
        patience=Timeouts(lease_s=300.0),
    )


def _sync_policy(get_model_steps: int, learning_rate: float, *, use_async: bool) -> SyncPolicy:
    require_counts(get_model_steps=get_model_steps)
    if get_model_steps > 1 and not use_async:
        raise PlanError(
            f"get_model_steps={get_model_steps} computes from weights of before, which synchronous training refuses; "
            "give use_async=True, or get_model_steps=1"
        )
    return SyncPolicy(pull_every=get_model_steps, local_lr=learning_rate if get_model_steps > 1 else 0.0)


def _check_ignored_options(others: IgnoredOptions) -> None:
    unknown = sorted(others.keys() - IgnoredOptions.__optional_keys__)
    if unknown:
        raise TypeError(f"elasticdl() got an unexpected keyword argument {unknown[0]!r}")
    if others.get("lr_staleness_modulation"):
        raise PlanError(
            "lr_staleness_modulation divides the learning rate by how old a gradient is, which a server's rule does "
            "not know; leave it out, or bound the age with Elastic(consistency='ssp(2)')"
        )
    if others.get("sync_version_tolerance"):
        raise PlanError(
            f"sync_version_tolerance={others['sync_version_tolerance']} counts gradients of older versions in a "
            "synchronous step, so that the result depends on who was late; give 0, or bound it with "
            "Elastic(consistency='ssp(2)')"
        )
    if others.get("max_step"):
        raise PlanError(
            f"max_step={others['max_step']} would leave out data, and here all data counts; give fewer epochs or "
            "samples"
        )


def _is_allreduce(others: IgnoredOptions, grads_to_wait: int, *, use_async: bool) -> bool:
    """Tell whether gradients are added up among workers instead of on servers."""
    distribution_strategy = others.get("distribution_strategy", "ParameterServerStrategy")
    if distribution_strategy == "Local":
        raise PlanError("Local trains in one process; take Trainer(strategy='solo'), which needs no servers")
    if distribution_strategy not in {"ParameterServerStrategy", "AllreduceStrategy"}:
        raise PlanError(
            f"there is no distribution_strategy {distribution_strategy!r}; give ParameterServerStrategy or "
            "AllreduceStrategy"
        )
    is_allreduce = distribution_strategy == "AllreduceStrategy"
    if is_allreduce and (use_async or grads_to_wait != 1):
        raise PlanError(
            f"grads_to_wait={grads_to_wait} and use_async={use_async} are about servers, which AllreduceStrategy has "
            "not; give num_workers, the minibatches of a batch, or ParameterServerStrategy"
        )
    return is_allreduce
