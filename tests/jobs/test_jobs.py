import math

import pytest
import torch
import torch.nn.functional as F

from counterpoint.data.fetch import fetch
from counterpoint.data.sampler import Sampler
from counterpoint.errors import CounterpointError, DataError, PlanError
from counterpoint.jobs.job import MetricTarget, batch_ranges, measure_accuracy, measure_bits, sequence_loss
from counterpoint.jobs.registry import JOBS, find_job
from counterpoint.training.metrics import MeanMetric, merge_metrics


def evaluate(job, model, dataset, batch_size=512):
    model.eval()
    with torch.no_grad():
        parts = [fetch(dataset, indices) for indices in batch_ranges(len(dataset), batch_size)]
        return merge_metrics(job.metrics(model(x), y) for x, y in parts)


def test_the_table_has_every_job_under_its_own_name():
    assert list(JOBS) == ["digits", "text", "lines"]
    assert all(find_job(name).name == name for name in JOBS)


def test_an_unknown_job_is_answered_with_the_nearest_one():
    with pytest.raises(PlanError, match=r"unknown job 'digts'; .* digits, text, lines; did you mean digits\?"):
        find_job("digts")
    with pytest.raises(CounterpointError, match="give one of digits, text, lines"):
        find_job("imagenet")


def test_a_seed_gives_the_same_model_and_leaves_the_random_numbers_alone():
    job = find_job("digits")
    torch.manual_seed(3)
    one, other, third = job.build_model(1), job.build_model(1), job.build_model(2)
    drawn = torch.rand(())
    torch.manual_seed(3)
    assert drawn == torch.rand(())
    weights = [next(model.parameters()) for model in (one, other, third)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.long(quick=["digits"])
@pytest.mark.parametrize("name", ["digits", "text"])
def test_a_job_takes_a_step_and_is_measured_by_its_own_metric(name):
    job = find_job(name)
    (train, held_out), model = job.build_data(), job.build_model(0)
    x, y = fetch(train, range(4))
    loss = job.loss(model(x), y)
    loss.backward()
    job.optimizer(model.parameters()).step()
    assert job.loss(model(x), y) < loss
    assert set(job.metrics(model(x), y)) == {job.target.metric}
    assert len(held_out) < len(train)


def test_the_lines_model_fits_the_lines():
    job = find_job("lines")
    with torch.device("meta"):
        model = job.build_model(0)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes == {"table.weight": (2**20, 32), "head.weight": (20, 32), "head.bias": (20,)}


@pytest.mark.long
def test_two_epochs_of_digits_are_learnt_beyond_the_bar_and_twice_the_same():
    job = find_job("digits")
    train, held_out = job.build_data()
    result = []
    for _ in range(2):
        model = job.build_model(0)
        optimizer, sampler = job.optimizer(model.parameters()), Sampler(len(train), job.batch_size)
        for index in [*range(sampler.num_batches)] * 2:
            x, y = fetch(train, sampler.batch(0, index))
            optimizer.zero_grad()
            job.loss(model(x), y).backward()
            optimizer.step()
        result.append(evaluate(job, model, held_out)["accuracy"])
    assert result[0].mean > 0.9
    assert result[0] == result[1]


def test_tallies_of_uneven_batches_add_up_to_that_of_all_samples():
    outputs, targets = torch.randn(10, 3), torch.randint(0, 3, (10,))
    whole = measure_accuracy(outputs, targets)
    parts = [measure_accuracy(outputs[part], targets[part]) for part in (slice(0, 7), slice(7, 10), slice(10, 10))]
    assert merge_metrics(parts) == whole
    assert whole["accuracy"].count == 10
    assert math.isnan(MeanMetric().mean)


def test_batches_measured_differently_cannot_be_added():
    with pytest.raises(DataError, match=r"one batch has the metrics \['a'\], another \['b'\]"):
        merge_metrics([{"a": MeanMetric(1.0, 1)}, {"b": MeanMetric(1.0, 1)}])


def test_bits_per_byte_is_the_loss_of_the_text_job_in_bits():
    outputs, targets = torch.randn(2, 5, 256), torch.randint(0, 256, (2, 5))
    bits = measure_bits(outputs, targets)["bits_per_byte"]
    assert bits.count == 10
    assert bits.mean == pytest.approx(float(sequence_loss(outputs, targets)) / math.log(2), rel=1e-6)
    assert torch.equal(sequence_loss(outputs, targets), F.cross_entropy(outputs.view(10, 256), targets.view(10)))


def test_a_bar_is_reached_from_its_good_side_only():
    assert MetricTarget("accuracy", 0.95, "higher").is_reached(0.95)
    assert not MetricTarget("accuracy", 0.95, "higher").is_reached(0.94)
    assert MetricTarget("bits_per_byte", 2.3, "lower").is_reached(2.2)
    assert not MetricTarget("bits_per_byte", 2.3, "lower").is_reached(math.nan)


def test_batches_cover_all_samples_in_order():
    assert [list(batch) for batch in batch_ranges(5, 2)] == [[0, 1], [2, 3], [4]]
