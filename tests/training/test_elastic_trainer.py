"""The public face of elastic training, over servers in this thread."""

import os
import signal
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from counterpoint.elastic.ps_worker import TaskEnded
from counterpoint.errors import PlanError
from counterpoint.ps.consistency import Ssp
from counterpoint.ps.in_process import LocalJob
from counterpoint.ps.update_rules import UniformInit
from counterpoint.strategies.parameter_server import Server
from counterpoint.training.elastic_trainer import ElasticTrainer
from tests.elastic.worker_fixtures import (
    SGD,
    embedding_bag_model,
    make_lookup_data,
    make_numeric_data,
    max_relative_difference,
    mlp,
    train_single_process,
)


def elastic(data, **options):
    consistency = {} if "consistency" in options else {"slices_per_step": 2}
    return ElasticTrainer(**{"dataset": data, "batch_size": 8, "epochs": 2, **consistency, **options})


def train(plan, session, model=None, **options):
    return plan.train(session, model or mlp(), **{"loss": F.cross_entropy, "optimizer": SGD, **options})


def test_a_model_is_trained_and_measured():
    plan, model = elastic(make_numeric_data()), mlp()
    report = train(plan, LocalJob(plan.job).join("a"), model, eval_dataset=make_numeric_data(10))
    assert report.is_complete
    assert len(report.losses) == 12
    assert max_relative_difference(model, train_single_process(mlp(), make_numeric_data(), plan.data_slices)) < 1e-12
    inputs, targets = make_numeric_data(10).tensors
    assert report.evaluations[-1].metrics["loss"] == pytest.approx(
        float(F.cross_entropy(model(inputs), targets).detach())
    )


def test_held_out_rows_are_looked_up_on_the_servers():
    plan = elastic(make_lookup_data(), consistency="asp", evaluate_every=2)
    options = {"tables": {"0.weight": UniformInit(-1, 1)}, "eval_dataset": make_lookup_data(10)}
    report = train(plan, LocalJob(plan.job).join("a"), embedding_bag_model(), **options)
    assert [result.step for result in report.evaluations] == [2, 4, 6, 6]


def test_a_worker_that_is_terminated_gives_its_task_back():
    plan = elastic(make_numeric_data(40), slices_per_task=2)
    servers = LocalJob(plan.job)

    def loss(outputs, targets):
        os.kill(os.getpid(), signal.SIGTERM)
        return F.cross_entropy(outputs, targets)

    report = train(plan, servers.join("a"), loss=loss)
    assert not report.is_complete
    assert [event.outcome for event in report.events if isinstance(event, TaskEnded)] == ["preempted"]
    model = mlp()
    assert train(plan, servers.join("b"), model).is_complete
    assert max_relative_difference(model, train_single_process(mlp(), make_numeric_data(40), plan.data_slices)) < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"consistency": "eventual"}, "there is no consistency=eventual; give bsp, ssp or asp"),
        ({"consistency": 3}, "there is no consistency=3"),
        ({"consistency": "bsp(4)"}, r"bsp\(4\) is now written consistency=bsp, slices_per_step=4"),
        ({"consistency": "ssp(2)"}, r"ssp\(2\) is now written consistency=ssp, staleness=2"),
        ({"consistency": "ssp", "staleness": -1}, "staleness=-1 with consistency=ssp"),
        ({"consistency": "asp", "staleness": 1}, "staleness=1 with consistency=asp"),
        ({"consistency": "asp", "slices_per_step": 2}, "slices_per_step=2 with consistency=asp"),
        ({"slices_per_step": 0}, "give slices_per_step=1 or more"),
    ],
)
def test_a_consistency_that_does_not_exist_is_refused(options, message):
    with pytest.raises(PlanError, match=message):
        elastic(make_numeric_data(), **options)


@pytest.mark.parametrize(("old", "new"), [("budget", "retry_policy"), ("patience", "timeouts")])
def test_an_earlier_option_is_refused_with_its_present_name(old, new):
    with pytest.raises(PlanError, match=f"ElasticTrainer has no parameter {old}; {old} is now called {new}"):
        elastic(make_numeric_data(), **{old: None})


@pytest.mark.parametrize(("old", "new"), [("codec", "compress"), ("unused", "unused_parameters")])
def test_an_earlier_option_of_a_worker_is_refused_with_its_present_name(old, new):
    plan = elastic(make_numeric_data())
    with pytest.raises(PlanError, match=f"RemoteModule has no parameter {old}; {old} is now called {new}"):
        train(plan, LocalJob(plan.job).join("a"), **{old: "int8"})


def test_the_trainer_and_the_strategy_write_consistency_alike():
    options: dict[str, Any] = {"consistency": "ssp", "staleness": 3}
    assert elastic(make_numeric_data(), **options).job.consistency == Ssp(3)
    assert str(Server(2, **options)) == "server(2, servers=1, consistency=ssp, staleness=3)"


def test_a_session_of_another_job_is_refused():
    session = LocalJob(elastic(make_numeric_data()).job).join("a")
    with pytest.raises(PlanError, match="build both from one Elastic"):
        train(elastic(make_numeric_data(), epochs=3), session)


class Scaled(torch.nn.Module):
    """A loss with a learned scale."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, output, targets):
        return F.cross_entropy(output * self.scale, targets)


@pytest.mark.parametrize("servers", [0, 1])
def test_a_loss_with_parameters_to_train_is_refused(servers):
    plan = elastic(make_numeric_data(), servers=servers)
    message = "the loss has trainable parameters of its own, scale, which cp.ElasticTrainer would not train; .*freeze"
    with pytest.raises(PlanError, match=message):
        train(plan, LocalJob(plan.job).join("a"), loss=Scaled())
    frozen = Scaled().requires_grad_(False)
    assert train(plan, LocalJob(plan.job).join("a"), loss=frozen).is_complete


def test_batch_norm_is_local_to_each_worker_on_request():
    plan = elastic(make_numeric_data())
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).double()
    session = LocalJob(plan.job).join("a")
    adam = partial(torch.optim.Adam, lr=0.01)
    assert train(plan, session, model, optimizer=adam, buffers="own").is_complete
    assert int(model.get_buffer("1.num_batches_tracked")) == 12


def test_without_servers_the_same_lines_train_the_same_model_under_any_optimizer():
    plan, model = elastic(make_numeric_data(), servers=0), mlp()
    rmsprop = partial(torch.optim.RMSprop, lr=0.01)
    report = train(plan, LocalJob(plan.job).join("a"), model, optimizer=rmsprop, eval_dataset=make_numeric_data(10))
    assert report.is_complete
    assert (
        max_relative_difference(model, train_single_process(mlp(), make_numeric_data(), plan.data_slices, rmsprop))
        < 1e-12
    )
    assert len(report.losses) == 12
    assert [result.step for result in report.evaluations] == [12]


def test_batch_norm_without_servers_is_local_to_each_worker_on_request():
    plan = elastic(make_numeric_data(), servers=0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).double()
    with pytest.raises(PlanError, match="buffers='own'"):
        train(plan, LocalJob(plan.job).join("a"), model)
    assert train(plan, LocalJob(plan.job).join("a"), model, buffers="own").is_complete


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compress": "int8"}, "compress= is an option for weights on servers"),
        ({"tables": {"0.weight": UniformInit(-1, 1)}}, "tables= is an option for"),
    ],
)
def test_what_is_about_servers_is_refused_without_them(options, message):
    plan = elastic(make_numeric_data(), servers=0)
    with pytest.raises(PlanError, match=message):
        train(plan, LocalJob(plan.job).join("a"), **options)


def test_asynchrony_without_servers_is_refused():
    with pytest.raises(PlanError, match="workers without servers are synchronous"):
        elastic(make_numeric_data(), servers=0, consistency="asp")
