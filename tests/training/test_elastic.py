"""The public face of elastic training, over servers in this thread."""

import os
import signal
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from counterpoint.errors import PlanError
from counterpoint.server.choices import Uniform
from counterpoint.server.local import LocalJob
from counterpoint.server.working.loop import Ended
from counterpoint.training.elastic import Elastic
from tests.server.working.crews import SGD, bags, distance, mlp, numbers, solo, words


def elastic(data, **options):
    return Elastic(**{"dataset": data, "batch_size": 8, "epochs": 2, "consistency": "bsp(2)", **options})


def train(plan, session, model=None, **options):
    return plan.train(session, model or mlp(), **{"loss": F.cross_entropy, "optimizer": SGD, **options})


def test_a_model_is_trained_and_measured():
    plan, model = elastic(numbers()), mlp()
    report = train(plan, LocalJob(plan.job).join("a"), model, evaluation=numbers(10))
    assert report.is_complete
    assert len(report.losses) == 12
    assert distance(model, solo(mlp(), numbers(), plan.portions)) < 1e-12
    inputs, targets = numbers(10).tensors
    assert report.evaluations[-1].metrics["loss"] == pytest.approx(
        float(F.cross_entropy(model(inputs), targets).detach())
    )


def test_held_out_rows_are_looked_up_on_the_servers():
    plan = elastic(words(), consistency="asp", evaluate_every=2)
    options = {"tables": {"0.weight": Uniform(-1, 1)}, "evaluation": words(10)}
    report = train(plan, LocalJob(plan.job).join("a"), bags(), **options)
    assert [found.step for found in report.evaluations] == [2, 4, 6, 6]


def test_a_worker_that_is_terminated_gives_its_task_back():
    plan = elastic(numbers(40), task_portions=2)
    servers = LocalJob(plan.job)

    def loss(outputs, targets):
        os.kill(os.getpid(), signal.SIGTERM)
        return F.cross_entropy(outputs, targets)

    report = train(plan, servers.join("a"), loss=loss)
    assert not report.is_complete
    assert [event.outcome for event in report.events if isinstance(event, Ended)] == ["preempted"]
    model = mlp()
    assert train(plan, servers.join("b"), model).is_complete
    assert distance(model, solo(mlp(), numbers(40), plan.portions)) < 1e-12


@pytest.mark.parametrize(
    ("text", "told"), [("bsp", "bsp\\(4\\)"), ("ssp(-1)", "ssp"), (3, "there is no consistency 3")]
)
def test_a_consistency_that_does_not_exist_is_refused(text, told):
    with pytest.raises(PlanError, match=told):
        elastic(numbers(), consistency=text)


def test_a_session_of_another_job_is_refused():
    session = LocalJob(elastic(numbers()).job).join("a")
    with pytest.raises(PlanError, match="build both from one Elastic"):
        train(elastic(numbers(), epochs=3), session)


def test_batch_norm_is_every_worker_s_own_if_that_is_meant():
    plan = elastic(numbers())
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).double()
    session = LocalJob(plan.job).join("a")
    adam = partial(torch.optim.Adam, lr=0.01)
    assert train(plan, session, model, optimizer=adam, buffers="own").is_complete
    assert int(model.get_buffer("1.num_batches_tracked")) == 12


def test_without_servers_the_same_lines_train_the_same_model_under_any_optimizer():
    plan, model = elastic(numbers(), servers=0), mlp()
    rmsprop = partial(torch.optim.RMSprop, lr=0.01)
    report = train(plan, LocalJob(plan.job).join("a"), model, optimizer=rmsprop, evaluation=numbers(10))
    assert report.is_complete
    assert distance(model, solo(mlp(), numbers(), plan.portions, rmsprop)) < 1e-12
    assert len(report.losses) == 12
    assert [found.step for found in report.evaluations] == [12]


def test_batch_norm_without_servers_is_every_worker_s_own_if_that_is_meant():
    plan = elastic(numbers(), servers=0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).double()
    with pytest.raises(PlanError, match="buffers='own'"):
        train(plan, LocalJob(plan.job).join("a"), model)
    assert train(plan, LocalJob(plan.job).join("a"), model, buffers="own").is_complete


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"code": "int8"}, "code= is about what lies on servers"),
        ({"tables": {"0.weight": Uniform(-1, 1)}}, "tables= is about"),
    ],
)
def test_what_is_about_servers_is_refused_without_them(options, told):
    plan = elastic(numbers(), servers=0)
    with pytest.raises(PlanError, match=told):
        train(plan, LocalJob(plan.job).join("a"), **options)


def test_asynchrony_without_servers_is_refused():
    with pytest.raises(PlanError, match="take every step together"):
        elastic(numbers(), servers=0, consistency="asp")
