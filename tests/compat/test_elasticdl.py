"""ElasticDL's options: what they become, and what is refused with a remedy."""

import pytest
import torch
import torch.nn.functional as F

from counterpoint.compat.elasticdl import elasticdl
from counterpoint.errors import PlanError
from counterpoint.ps.consistency import Asp, Bsp
from counterpoint.ps.in_process import LocalJob
from counterpoint.ps.job_config import DataConfig
from tests.elastic.worker_fixtures import SGD, make_numeric_data, max_relative_difference, mlp, train_single_process


def test_synchronous_training_averages_the_gradients_it_waits_for():
    plan, model, expected = elasticdl(make_numeric_data(20), minibatch_size=5, grads_to_wait=2), mlp(), mlp()
    assert plan.job.consistency == Bsp(2)
    plan.train(LocalJob(plan.job).join("a"), model, loss=F.cross_entropy, optimizer=SGD)
    updates = SGD(expected.parameters())
    for step in range(2):
        updates.zero_grad()
        for data_slice in (2 * step, 2 * step + 1):
            (one,) = plan.data_slices.read(0, data_slice)
            (F.cross_entropy(expected(one.fields[0]), one.fields[1]) / 2).backward()
        updates.step()
    assert max_relative_difference(model, expected) < 1e-12


def test_asynchronous_training_gives_tasks_of_several_minibatches():
    job = elasticdl(
        make_numeric_data(40), minibatch_size=5, use_async=True, num_minibatches_per_task=3, num_ps_pods=2
    ).job
    assert (job.consistency, job.num_servers, job.data) == (Asp(), 2, DataConfig(8, 1, 3, 0))


def test_a_task_that_fails_is_never_dropped():
    assert elasticdl(make_numeric_data(), minibatch_size=5).job.retry_policy.max_failures == 3
    assert (
        elasticdl(make_numeric_data(), minibatch_size=5, task_fault_tolerance=False).job.retry_policy.max_failures == 0
    )


def test_allreduce_cuts_a_batch_into_a_minibatch_for_each_worker_there_is_at_first():
    data = make_numeric_data(20)
    plan = elasticdl(data, minibatch_size=5, num_workers=2, distribution_strategy="AllreduceStrategy")
    assert (plan.job.num_servers, plan.job.consistency, plan.job.data) == (0, Bsp(2), DataConfig(4, 1, 2, 2))
    model, expected = mlp(), mlp()
    plan.train(LocalJob(plan.job).join("a"), model, loss=F.cross_entropy, optimizer=torch.optim.AdamW)
    assert (
        max_relative_difference(
            model, train_single_process(expected, data, plan.data_slices, torch.optim.AdamW, epochs=1)
        )
        < 1e-12
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_staleness_modulation": True}, "which servers do not support"),
        ({"sync_version_tolerance": 1}, "depends on timing"),
        ({"get_model_steps": 2}, "give use_async=True"),
        ({"max_step": 10}, "every sample is trained on"),
        ({"distribution_strategy": "AllreduceStrategy", "grads_to_wait": 2}, "give num_workers"),
        ({"distribution_strategy": "AllreduceStrategy", "use_async": True}, "apply to servers"),
        ({"distribution_strategy": "Local"}, "strategy='solo'"),
        ({"distribution_strategy": "Horovod"}, "unknown distribution_strategy"),
        ({"num_epochs": 0}, "num_epochs"),
    ],
)
def test_what_is_not_done_here_is_refused_with_a_remedy(options, message):
    data = torch.utils.data.TensorDataset(torch.zeros(4, 2), torch.zeros(4))
    with pytest.raises(PlanError, match=message):
        elasticdl(data, minibatch_size=2, **options)
