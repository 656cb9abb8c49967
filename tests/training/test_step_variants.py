"""Runs whose steps are not all the same: what is measured, saved, resumed, left out and given back in the middle."""

from fractions import Fraction
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import counterpoint as cp
from counterpoint.checkpoint import Checkpoint
from counterpoint.compiler.compile import value_bytes
from counterpoint.errors import DataError
from counterpoint.program.comm_volume import bytes_by_instruction
from counterpoint.program.text import parse_instruction
from counterpoint.testing.parity import relative_difference
from counterpoint.training.plan_resolution import share_params_per_host
from counterpoint.training.ranks.step_trace import trace_step
from tests.runtime import local_ranks as teams
from tests.training.trainers import (
    ADAMW,
    StopAt,
    batch_norm_mlp,
    build_seeded,
    dataset,
    equal_bits,
    fit,
    make_trainer,
    max_difference,
    mlp,
    params_of,
)

APART = "data(2, sync_every=3, sync_first=1)"
LATE = "data(2, staleness=1)"
BOTH = pytest.mark.parametrize("strategy", [APART, LATE, "pipeline(2) * data(2, sync_every=3)",
                                            "tensor(2) * data(2, staleness=1)"])  # fmt: skip
SETTINGS = {"clip_norm": 0.5, "epochs": 2}


def saving(folder):
    return {"checkpoint_dir": folder, "save_every": 2}


@BOTH
def test_replicas_with_weights_or_gradients_of_their_own_do_not_share_their_update(strategy):
    plan = cp.Plan.parse(strategy)
    assert share_params_per_host(plan, range(4)) == share_params_per_host(plan, (0, 0, 0, 0)) == plan


@pytest.mark.long
@BOTH
def test_an_interrupted_run_continues_bit_for_bit_in_mid_period(strategy, tmp_path):
    build = mlp if "tensor" in strategy else batch_norm_mlp
    whole, history = fit(strategy, build(), fit_options=saving(tmp_path / "a"), **SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        fit(strategy, build(), fit_options=saving(tmp_path / "b"), callbacks=[StopAt(2)], **SETTINGS)
    resume_options = {"resume": tmp_path / "b", **saving(tmp_path / "b")}
    result, rest = fit(strategy, build(), fit_options=resume_options, **SETTINGS)
    assert [step.loss for step in rest.steps] == [step.loss for step in history.steps[2:]]
    assert equal_bits(result, whole)


@pytest.mark.long(quick=["data(2, sync_every=3, sync_first=1)"])
@pytest.mark.parametrize("strategy", [APART, LATE])
def test_the_checkpoint_at_the_end_of_a_fit_continues_as_if_the_fit_had_been_longer(strategy, tmp_path):
    """Although the model was given the mean of the replicas, or misses the last gradient."""
    whole, _ = fit(strategy, epochs=2)
    fit(strategy, epochs=2, fit_options={"max_steps": 3, "checkpoint_dir": tmp_path})
    assert equal_bits(fit(strategy, epochs=2, fit_options={"resume": tmp_path})[0], whole)


@pytest.mark.long(quick=["data(2, sync_every=3, sync_first=1)"])
@pytest.mark.parametrize("strategy", [APART, LATE])
def test_looking_at_a_run_does_not_change_it(strategy):
    looked = {"eval_dataset": dataset(7), "evaluate_every": 1}
    assert equal_bits(fit(strategy, epochs=2, fit_options=looked)[0], fit(strategy, epochs=2)[0])


def test_what_is_measured_in_mid_period_is_the_mean_of_the_replicas():
    with make_trainer("data(4, sync_every=5)") as one:
        history = one.fit(dataset(), batch_size=12, max_steps=2, eval_dataset=dataset(7))
        inputs, targets = dataset(7).tensors
        with torch.no_grad():
            expected = float(F.cross_entropy(one.model(inputs), targets))
        assert history.evaluations[-1].metrics["loss"] == pytest.approx(expected, rel=1e-12)
        stores = [rank.interpreter.store for rank in one.local_ranks.ranks.values()]
        copies = [torch.cat([flat.weights for flat in store.flat_params()]) for store in stores]
    assert min(relative_difference(copy, other) for copy in copies for other in copies if copy is not other) > 0
    mean = torch.cat([param.detach().reshape(-1) for param in params_of(one.model).values()])
    assert relative_difference(torch.stack(copies).mean(0), mean) <= 1e-12


@pytest.mark.long(quick=["data(4, sync_every=3)"])
@pytest.mark.parametrize("strategy", ["data(4)", "solo", "data(4, sync_every=3)"])
def test_another_plan_continues_from_the_mean_of_the_replicas(strategy, tmp_path):
    mean, _ = fit("data(2, sync_every=3)", fit_options={"max_steps": 2, "checkpoint_dir": tmp_path})
    result, _ = fit(strategy, fit_options={"max_steps": 2, "resume": tmp_path})
    assert max_difference(result, mean) <= 1e-15


@pytest.mark.long
def test_a_gradient_that_was_set_aside_is_added_up_where_another_number_of_replicas_continues(tmp_path):
    whole, _ = fit(LATE, epochs=2)
    fit(LATE, epochs=2, fit_options={"max_steps": 3, "checkpoint_dir": tmp_path})
    assert max_difference(fit("data(4, staleness=1)", epochs=2, fit_options={"resume": tmp_path})[0], whole) <= 1e-12


def test_a_plan_that_delays_no_gradient_says_that_it_drops_the_one_that_was(tmp_path):
    given, _ = fit(LATE, fit_options={"max_steps": 2, "checkpoint_dir": tmp_path})
    with pytest.warns(RuntimeWarning, match="the gradient of step 1, which data.2, staleness=1. had delayed"):
        result, _ = fit("data(2)", fit_options={"max_steps": 2, "resume": tmp_path})
    assert equal_bits(result, given)


def test_a_checkpoint_has_the_weights_and_the_optimizer_of_every_replica(tmp_path):
    fit("data(2, sync_every=3)", fit_options={"max_steps": 2, "checkpoint_dir": tmp_path})
    result = Checkpoint.open(tmp_path)
    for kind in ("model", "optimizer.exp_avg"):
        first, second = (result.read(f"{kind}:0.weight~{replica}/2") for replica in range(2))
        assert relative_difference(first, second) > 0


@pytest.mark.long(quick=["data(4, sync_every=8, sync_first=4)-5"])
@pytest.mark.parametrize(
    ("strategy", "sums"), [("data(4)", 16), ("data(4, sync_every=8)", 2), ("data(4, sync_every=8, sync_first=4)", 5),
                           ("data(4, staleness=1)", 15)]
)  # fmt: skip
def test_sixteen_steps_send_the_bytes_of_their_formulas(strategy, sums):
    """Counted over the instructions that every rank ran, by its timings."""
    feed, sent = teams.make_batch(4), [Fraction(0)] * 4
    with teams.build_local_ranks(strategy) as one:
        for number in range(16):
            _, trace = trace_step(one, number, feed)
            for event in trace.events:
                words = tuple(map(parse_instruction, event.text.split()))
                size_of = partial(value_bytes, model=one.compiled.model, samples_per_micro=2)
                sent[event.rank] += sum(sent for _, sent in bytes_by_instruction(event.rank, words, size_of))
        weights = sum(param.num_bytes for param in one.compiled.model.params)
    assert sent == [sums * 2 * Fraction(3, 4) * weights] * 4


def poisoned():
    """A dataset with inputs that are not numbers in one sample."""
    inputs, targets = dataset().tensors
    inputs[20] = float("nan")
    return torch.utils.data.TensorDataset(inputs, targets)


@pytest.mark.parametrize("strategy", ["data(2, sync_every=2)", LATE])
def test_a_step_with_a_non_finite_loss_is_skipped_by_all_replicas(strategy):
    with make_trainer(strategy, nonfinite="skip", clip_norm=1.0) as one:
        history = one.fit(poisoned(), batch_size=12, epochs=2)
    assert sum(bool(step.skip_reason) for step in history.steps) == 2
    assert all(bool(param.isfinite().all()) for param in one.model.parameters())


def test_leaving_out_a_step_leaves_out_the_update_with_its_own_gradient_one_step_later():
    """Step 1 has no finite loss: step 1 applies the gradient of step 0, step 2 none, step 3 that of step 2."""
    inputs, targets = dataset(48).tensors
    inputs[12] = float("nan")
    step = cp.parallelize(mlp(), ADAMW, F.cross_entropy, strategy="data(2, staleness=1)", nonfinite="skip")
    seen = []
    with step:
        for at in range(4):
            step(inputs[12 * at : 12 * at + 12], targets[12 * at : 12 * at + 12])
            seen.append(params_of(step.export_weights()))
    changed = [
        max_difference(after, before) > 0 for before, after in zip([params_of(mlp()), *seen], seen, strict=False)
    ]
    assert changed == [False, True, False, True]


def test_a_loss_that_is_not_finite_ends_a_run_by_default():
    with pytest.raises(DataError, match="the loss of microbatch"):
        fit("data(2, sync_every=2)", data=poisoned())


@pytest.mark.long(quick=["data(2, sync_every=3, sync_first=1)"])
@pytest.mark.parametrize("strategy", [APART, LATE])
def test_a_second_fit_begins_from_the_model_unchanged(strategy):
    with make_trainer(strategy) as one:
        one.fit(dataset(), batch_size=12, max_steps=2)
        with torch.no_grad():
            for param in one.model.parameters():
                param.zero_()
        one.fit(dataset(), batch_size=12, max_steps=1)
        weights = params_of(one.model)
    changed = max(float(value.abs().max()) for value in weights.values())
    assert changed == 0 if strategy == LATE else changed < 0.03


def embedded(strategy, *, sparse):
    """The parameters after five steps of a model with a table of embeddings."""
    draw = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(0, 50, (12, 5), generator=draw), torch.randint(0, 3, (12,), generator=draw)
    model = build_seeded(
        lambda: torch.nn.Sequential(torch.nn.EmbeddingBag(50, 4, sparse=sparse), torch.nn.Linear(4, 3))
    )
    with cp.parallelize(model, partial(torch.optim.SGD, lr=0.1), F.cross_entropy, strategy=strategy) as step:
        for _ in range(5):
            step(tokens, targets)
    return params_of(model)


def test_replicas_with_sparse_gradients_update_separately_as_those_with_dense_ones_do():
    result, expected = (embedded("data(2, sync_every=2)", sparse=sparse) for sparse in (True, False))
    assert max_difference(result, expected) <= 1e-12


def test_a_sparse_gradient_is_not_set_aside():
    with pytest.raises(DataError, match=r"the gradient of 0.weight is sparse and cannot be delayed by a step; build"):
        embedded(LATE, sparse=True)
