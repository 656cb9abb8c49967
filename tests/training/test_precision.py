"""Mixed precision: what a plain loop with the same casts computes, under every plan; casts of modules and autocast."""

import copy
import re
from dataclasses import replace
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.func import functional_call

import counterpoint as cp
from counterpoint.model.precision import Precision, parse_precision
from counterpoint.partitioning.module_casts import ModuleCasts
from counterpoint.partitioning.tracing.traced import TracedPartition
from counterpoint.testing.device_survey import (
    MODEL_PLANS,
    OTHER_NAMES,
    PLANS,
    batches,
    build,
    largest_difference,
    make_optimizer,
    make_step,
)  # fmt: skip
from counterpoint.training.agreement.rank_facts import describe_options, first_difference
from counterpoint.training.options import TrainingOptions, use_plan_options
from counterpoint.training.plan_resolution import RequestedPlan
from tests.training.trainers import dataset, equal_bits, make_trainer, mlp, state_of

DIFFERENT = ("compress", "adasum", "sync_every", "staleness", "pipedream", "asp", "easgd", "downpour", "project_adam",
             "parameter_server_strategy")  # fmt: skip
"""Parts of the names of plans that do not train as one device does."""
SYNCHRONOUS = [plan for plan in (*PLANS, *OTHER_NAMES) if not any(part in plan for part in DIFFERENT)] + [
    "pipedream_flush(2)"
]


def train(model, plan, num_steps=3, **options):
    """Return the losses and trained values of a few steps, and the number of parts of each batch."""
    step, trained = make_step(model, plan, "cpu", **options)
    with step:
        losses = [float(step(*batch)) for _, batch in zip(range(num_steps), batches(model), strict=False)]
        num_parts = step.local_ranks.global_num_microbatches
    return losses, state_of(trained), num_parts


def has_pairs(model, plan):
    return not ("tensor" in plan or "mpi_caffe" in plan) or model == "gpt"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long(quick=["embedding-data(2)-bf16", "cnn-pipeline(2)-bf16", "mlp-gpipe(2)-fp16(norms=compute)"])
@pytest.mark.parametrize("precision", ["bf16", "fp16(norms=compute)"])
@pytest.mark.parametrize(
    ("model", "plan"),
    [("mlp", plan) for plan in SYNCHRONOUS if has_pairs("mlp", plan)]
    + [
        (model, plan)
        for model in ("gpt", "cnn", "embedding", "experts")
        for plan in MODEL_PLANS
        if has_pairs(model, plan)
    ],
)
def test_a_plan_computes_what_one_device_does_on_the_same_parts(model, plan, precision):
    """In float64 weights: they are summed there, so that only the casts could differ."""
    actual = train(model, plan, precision=precision, loss_scale=1.0)
    solo = train(model, "solo", num_microbatches=actual[2], precision=precision, loss_scale=1.0)
    if "tensor" not in plan:
        assert largest_difference(actual[:2], solo[:2]) <= 1e-12
    else:  # each shard rounds its part of a sum to bf16
        torch.testing.assert_close(actual[0], solo[0], rtol=2e-2, atol=0.0)
    assert all(value.dtype in {torch.float64, torch.int64} for value in actual[1].values())


def plain_loop(model, name, forward, num_steps=3):
    """Return the losses and weights of a plain loop with another forward."""
    optimizer = make_optimizer(name, "solo")(model.parameters())
    losses = []
    for _, (inputs, targets) in zip(range(num_steps), batches(name), strict=False):
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(model, inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, state_of(model)


def cast_everything(model, inputs):
    casts = {name: param.bfloat16() for name, param in model.named_parameters()}
    return functional_call(model, casts, (inputs.bfloat16(),)).float()


def test_it_is_a_plain_loop_with_casts_of_all_parameters():
    expected = plain_loop(build("mlp"), "mlp", cast_everything)
    assert largest_difference(train("mlp", "solo", precision="bf16")[:2], expected) <= 1e-12


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 4)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


def normed_by_hand(model, inputs, *, norm_dtype):
    first, norm, second = model.first, model.norm, model.second
    hidden = F.linear(inputs.bfloat16(), first.weight.bfloat16(), first.bias.bfloat16())
    weight, bias = norm.weight.to(norm_dtype), norm.bias.to(norm_dtype)
    normed = F.layer_norm(hidden.to(norm_dtype), (12,), weight, bias).bfloat16()
    return F.linear(normed, second.weight.bfloat16(), second.bias.bfloat16())


@pytest.mark.parametrize(
    ("precision", "norm_dtype", "output_dtype"),
    [
        (Precision("bf16"), torch.float32, torch.float32),
        (Precision("bf16", norms="compute"), torch.bfloat16, torch.float32),
        (Precision("bf16", output="compute"), torch.float32, torch.bfloat16),
    ],
)
def test_norms_and_outputs_have_the_dtypes_that_were_asked_for(precision, norm_dtype, output_dtype):
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(3, 8)
    expected = normed_by_hand(copy.deepcopy(model), x, norm_dtype=norm_dtype).to(output_dtype)
    casts = ModuleCasts(model, precision)
    assert torch.equal(model(x), expected)
    assert model(x).dtype == output_dtype
    casts.remove()
    assert model(x).dtype == torch.float32


class Several(nn.Module):
    """A tied head, attention, a float32 buffer, an LSTM, a parametrized weight, a list of parameters."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.register_buffer("positions", torch.randn(5, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.memory = nn.LSTM(8, 8, batch_first=True)
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.scales = nn.ParameterList([torch.ones(8), torch.ones(8)])

    def forward(self, tokens):
        hidden = self.table(tokens) + self.positions
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = self.linear(self.memory(hidden)[0]) * self.scales[0]
        return F.linear(hidden, self.table.weight)


def test_every_kind_of_module_computes_in_the_dtype():
    torch.manual_seed(0)
    model, tokens = Several(), torch.randint(10, (2, 5))
    wide = model(tokens)
    casts = ModuleCasts(model, Precision("bf16"))
    narrow, copied = model(tokens), copy.deepcopy(model)
    narrow.sum().backward()
    torch.testing.assert_close(narrow, wide, rtol=0.1, atol=0.1)
    assert not torch.equal(narrow, wide)
    grads = {name: param.grad for name, param in model.named_parameters()}
    assert {name for name, grad in grads.items() if grad is None} == {"scales.1"}
    assert {grad.dtype for grad in grads.values() if grad is not None} == {torch.float32}
    assert torch.equal(copied(tokens), narrow)
    casts.remove()
    assert torch.equal(model(tokens), wide)
    assert torch.equal(copied(tokens), narrow)


class ChangesParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.count = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x):
        self.count.add_(1)
        return self.linear(x)


def test_a_parameter_that_a_forward_changes_in_place_is_named():
    casts = ModuleCasts(model := ChangesParameter(), Precision("bf16"))
    with pytest.raises(cp.DataError, match="the forward changes the parameter count in place, but with precision="):
        model(torch.ones(2, 8))
    casts.remove()
    assert model(torch.ones(2, 8)).shape == (2, 4)


class ReadsInRecomputation(nn.Module):
    """A method that is recomputed reads a parameter of its own module, outside of any call of a module."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gamma = nn.Parameter(torch.linspace(0.3, 1.7, 8))

    def scaled(self, x):
        return torch.tanh(self.second(x * self.gamma) + self.gamma)

    def forward(self, x):
        x = self.first(x)
        if self.use_reentrant is None:
            return self.scaled(x)
        return torch.utils.checkpoint.checkpoint(self.scaled, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_is_recomputed_reads_casts_too(use_reentrant):
    grads = []
    for choice in (None, use_reentrant):
        torch.manual_seed(0)
        model = ReadsInRecomputation(choice)
        casts = ModuleCasts(model, Precision("bf16"))
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(1))).square().mean().backward()
        casts.remove()
        grads.append([param.grad for param in model.parameters() if param.grad is not None])
    assert len(grads[0]) == 5
    assert all(map(torch.equal, *grads))


def test_a_norm_whose_weights_are_narrow_computes_in_float32():
    torch.manual_seed(0)
    norm, x = nn.LayerNorm(8), torch.randn(3, 8)
    model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 4)).bfloat16()
    casts = ModuleCasts(model, Precision("bf16"))
    output = model(x)
    casts.remove()
    hidden = model[0](x.bfloat16())
    normed = F.layer_norm(hidden.float(), (8,), norm.weight.float(), norm.bias.float(), norm.eps)
    assert torch.equal(output, model[2](normed.bfloat16()).float())
    assert norm.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["bf16", "bf16(rounding=stochastic)", "bf16(norms=compute)"])
@pytest.mark.parametrize("plan", ["solo", "data(2)"])
def test_batch_norm_whose_statistics_are_in_bf16_computes_in_it(plan, precision):
    """It was an error of torch: "expected scalar type Float but found BFloat16"."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)).bfloat16()
    x, y = torch.randn(8, 8).bfloat16(), torch.randint(4, (8,))
    expected = F.cross_entropy(copy.deepcopy(model)(x).float(), y).item()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(
        model, optimizer, F.cross_entropy, strategy=plan, batch_norm="sync", precision=precision
    ) as step:
        assert float(step(x, y)) == pytest.approx(expected, rel=1e-2)
    assert model[1].running_mean.dtype == torch.bfloat16
    assert model[1].num_batches_tracked == 1


def test_a_weight_in_float8_is_refused_unless_it_is_frozen():
    """It was an error of torch while gradients were summed."""
    model = nn.Linear(8, 4)
    model.scale = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn))
    with pytest.raises(cp.PlanError, match=r"^scale is in float8_e4m3fn, in which torch neither sums gradients nor up"):
        cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.cross_entropy)
    model.scale.requires_grad = False
    with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, strategy="data(2)") as step:
        assert step(torch.ones(4, 8), torch.tensor([0, 1, 2, 3])) > 0


class AutocastInside(nn.Linear):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize("plan", ["data(2)", "server(2)"])
def test_an_autocast_inside_the_model_may_be_to_another_dtype(plan):
    """The check of losses joined samples in bf16 inside the autocast to fp16, which torch refuses."""
    x, y = torch.ones(4, 8), torch.tensor([0, 1, 2, 3])
    losses = []
    for strategy in (plan, "solo"):
        torch.manual_seed(0)
        model = AutocastInside(8, 4)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        with cp.parallelize(
            model, optimizer, F.cross_entropy, strategy=strategy, precision="fp16(autocast=true)"
        ) as step:
            losses.append([float(step(x, y)) for _ in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_hook_that_fails_before_a_forward_leaves_the_casts_as_they_were():
    model, x = Normed(), torch.randn(3, 8)
    fail = model.register_forward_pre_hook(lambda *_: [][0])
    casts = ModuleCasts(model, Precision("bf16"))
    with pytest.raises(IndexError):
        model(x)
    assert model.first.weight.dtype == torch.float32
    fail.remove()
    assert torch.equal(model(x), normed_by_hand(model, x, norm_dtype=torch.float32).float())
    assert model.first.weight.dtype == torch.float32
    casts.remove()


class DependsOnValues(Normed):
    """A forward that cannot be traced, because it depends on the values of a tensor."""

    def forward(self, x):
        hidden = self.first(x)
        return self.second(-hidden if float(hidden.detach().sum()) > 1e9 else hidden)


def test_a_trace_that_an_error_ends_leaves_the_casts_as_they_were():
    """Hooks of modules were not called after it, so that reads outside of forwards were cast, and copies failed."""
    model = DependsOnValues()
    casts = ModuleCasts(model, Precision("bf16"))
    with pytest.raises(cp.PlanError, match="tracing the model stopped"):
        TracedPartition(model, (torch.randn(2, 8),))
    assert model.first.weight.dtype == torch.float32
    assert copy.deepcopy(model)(torch.randn(2, 8)).dtype == torch.float32
    casts.remove()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long(quick=["zero(2, level=3)"])
@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero(2, level=3)", "pipeline(2)", "tensor(2)", "server(2)",
                                  "pipeline(2, schedule=pipedream)", "server(2, consistency=asp)"])  # fmt: skip
def test_the_autocast_of_a_precision_is_that_around_the_step(plan):
    name = "mlp" if "pipedream" in plan else "gpt"  # whose tied weights cannot be in two stages there

    def run(enabled, **options):
        step, model = make_float32_step(name, plan, **options)
        with step:
            for _, (inputs, targets) in zip(range(4), batches(name), strict=False):
                inputs = inputs.float() if inputs.is_floating_point() else inputs
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                    step(inputs, targets)
        return state_of(model)

    expected, plain = run(enabled=True), run(enabled=False)
    actual = run(enabled=False, precision="bf16(autocast=true)")
    assert equal_bits(actual, expected)
    assert not equal_bits(actual, plain)


def token_loss(output, targets):
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def make_float32_step(name, plan, **options):
    model = build(name).float()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    return cp.parallelize(model, optimizer, token_loss, strategy=plan, timeout_s=20.0, **options), model


def test_fp16_starts_with_a_dynamic_loss_scale_and_bf16_with_none():
    step, _ = make_step("mlp", "data(2)", "cpu", precision="fp16")
    assert step.local_ranks.options.loss_scale == "dynamic"
    for options in ({"precision": "bf16"}, {"precision": "fp16", "loss_scale": 8.0}):
        step, _ = make_step("mlp", "data(2)", "cpu", **options)
        assert step.local_ranks.options.loss_scale == options.get("loss_scale")


@pytest.mark.parametrize("precision", ["bf16", "bf16(autocast=true)"])
def test_evaluation_computes_in_the_precision(precision):
    data = dataset()
    inputs, targets = data.tensors
    with make_trainer("data(2)", precision=precision) as trainer:
        trainer.fit(data, batch_size=12, epochs=1)
        evaluated = trainer.evaluate(data, batch_size=len(data))["loss"]
        model = copy.deepcopy(trainer.model)
    expected = mlp()
    expected.load_state_dict(model.state_dict())
    dtype = torch.float64 if "autocast" in precision else torch.bfloat16
    casts = {name: param.to(dtype) for name, param in expected.named_parameters()}
    loss = F.cross_entropy(functional_call(expected, casts, (inputs.to(dtype),)), targets)
    assert evaluated == pytest.approx(float(loss.detach()), rel=1e-2)


def test_checkpoints_have_the_weights_in_their_own_dtype(tmp_path):
    kwargs = {"precision": "bf16", "seed": 3}
    with make_trainer("zero(2, level=3)", **kwargs) as trainer:
        trainer.fit(dataset(), batch_size=12, epochs=2, checkpoint_dir=tmp_path / "whole")
        expected = state_of(trainer.model)
    with make_trainer("data(2)", **kwargs) as trainer:
        trainer.fit(dataset(), batch_size=12, epochs=1, checkpoint_dir=tmp_path)
    with make_trainer("data(2)", **kwargs) as trainer:
        trainer.fit(dataset(), batch_size=12, epochs=2, checkpoint_dir=tmp_path, resume="auto")
        resumed = state_of(trainer.model)
    assert {value.dtype for value in resumed.values()} == {torch.float64}
    torch.testing.assert_close(resumed, expected, rtol=1e-12, atol=1e-12)


MASTERS, REDUCED = "bf16(reduce=bf16, weights=compute)", "bf16(reduce=bf16)"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long(quick=["gpt-zero(2, level=2)", "cnn-zero(2, level=1)"])
@pytest.mark.parametrize("plan", ["zero(2, level=1)", "zero(2, level=2)", "pipeline(2) * zero(2, level=1)"])
@pytest.mark.parametrize("model", ["mlp", "gpt", "cnn", "experts"])
def test_master_weights_of_shards_change_no_bit_with_one_microbatch(model, plan):
    held, reduced = (train(model, plan, num_microbatches=1, precision=text) for text in (MASTERS, REDUCED))
    assert held[0] == reduced[0]
    assert equal_bits(held[1], reduced[1])


@pytest.mark.long(quick=["zero(2, level=2)-data(2)"])
@pytest.mark.parametrize(
    ("plan", "other"),
    [
        ("zero(2, level=2)", "data(2)"),
        ("zero(2, level=1)", "zero(2, level=3)"),
        ("zero(2, level=3)", "zero(2, level=1)"),
    ],
)
def test_a_run_with_master_weights_continues_one_of_another_plan_and_precision(plan, other, tmp_path):
    def fit(strategy, precision, epochs, **options):
        with make_trainer(strategy, precision=precision, seed=3, num_microbatches=1) as trainer:
            trainer.fit(dataset(), batch_size=12, epochs=epochs, **options)
            return state_of(trainer.model)

    first, second = (REDUCED if "level=3" in one or "data" in one else MASTERS for one in (plan, other))
    fit(plan, first, 1, checkpoint_dir=tmp_path)
    resumed = fit(other, second, 2, checkpoint_dir=tmp_path, resume="auto")
    assert equal_bits(resumed, fit("data(2)", REDUCED, 2))
    assert {value.dtype for value in resumed.values()} == {torch.float64}


def test_a_model_whose_ranks_hold_narrow_weights_is_read_and_written_in_its_own_dtype():
    read = []
    for precision in (MASTERS, REDUCED):
        step, model = make_step("mlp", "zero(2, level=2)", "cpu", precision=precision)
        with step:
            for batch in islice(batches("mlp"), 2):
                step(*batch)
                read.append(state_of(model))
                with step.full_weights(writeback=True) as whole, torch.no_grad():
                    next(whole.parameters()).mul_(0.5)
        read.append(state_of(model))
    assert all(map(equal_bits, read[:3], read[3:]))
    assert {value.dtype for value in read[0].values()} == {torch.float64}


def test_the_model_is_as_before_when_the_run_ends_or_cannot_be_built():
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4))
    step = cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, precision="bf16")
    with step:
        step(torch.randn(4, 8), torch.zeros(4, dtype=torch.int64))
        assert model[0].weight.dtype == torch.float32
    assert type(vars(model[0])["_parameters"]) is dict
    step = cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, precision="bf16")
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        step(torch.randn(4, 7), torch.zeros(4, dtype=torch.int64))
    assert type(vars(model[0])["_parameters"]) is dict
    assert not vars(model[0])["_forward_hooks"]


@pytest.mark.parametrize(
    ("precision", "text"),
    [
        ("bf17", "precision 'bf17' is not one of fp32, bf16, fp16"),
        ("float16", "precision 'float16' is not one of fp32, bf16, fp16; write fp16"),
        (
            16,
            "precision=16 is a int; give fp32, bf16, fp16, a text such as 'bf16(autocast=true)', or cp.Precision(...)",
        ),
        ("bf16(", "precision='bf16(' cannot be read; give fp32, bf16, fp16, "),
        ("bf16(master=fp32)", "'master=fp32' is not an option of it, or there twice; the options are autocast=true, "),
        ("bf16(autocast=true, autocast=true)", "'autocast=true' is not an option of it, or there twice"),
        ("bf16(autocast=maybe)", "autocast='maybe' is not True or False"),
        ("bf16(norms=bf16)", "norms='bf16' is not fp32 or compute"),
        ("bf16(reduce=compute)", "reduce='compute' is not one of fp32, bf16, fp16"),
        ("fp32(autocast=true)", "autocast computes in bf16 or fp16; give one of them, or fp32 without autocast"),
        ("bf16(autocast=true, output=compute)", "autocast has its own rules for norms and outputs; omit norms and "),
        ("b" * 1000, "cannot be read"),
        ("bf16(weights=bf16)", "weights='bf16' is not fp32 or compute"),
        ("bf16(weights=compute)", "ranks sum them in it; write bf16(reduce=bf16, weights=compute), or omit weights"),
        ("fp16(reduce=bf16, weights=compute)", "write fp16(reduce=fp16, weights=compute), or omit weights"),
        ("fp32(reduce=bf16, weights=compute)", "weights=compute is for modules that are cast to bf16 or fp16"),
        ("bf16(autocast=true, reduce=bf16, weights=compute)", "without autocast and rounding, or omit weights"),
        ("bf16(rounding=stochastic, reduce=bf16, weights=compute)", "and keeps master weights; write bf16(reduce=bf16"),
    ],
)
def test_a_wrong_precision_is_an_error_that_says_what_to_write(precision, text):
    with pytest.raises(cp.PlanError, match=re.escape(text)):
        make_step("mlp", "data(2)", "cpu", precision=precision)


@pytest.mark.parametrize("precision", ["bf16", "bf16(autocast=true)", "fp32"])
def test_an_autocast_beside_a_precision_is_refused(precision):
    step, _ = make_step("mlp", "data(2)", "cpu", precision=precision)
    batch = next(batches("mlp"))
    with step:
        step(*batch)
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(
                cp.PlanError,
                match=re.escape("the step is called inside torch.autocast(cpu, torch.bfloat16), but precision="),
            ),
        ):
            step(*batch)


def test_a_plan_file_has_the_precision():
    plan = cp.Plan.from_yaml(
        'plan:\n  strategy: data(2)\n  precision: "bf16(norms=compute)"\nnum_ranks: 2\n', "plan.yaml"
    )
    assert plan.precision == Precision("bf16", norms="compute")
    assert cp.Plan.from_yaml(plan.to_yaml()) == plan
    assert "precision" not in cp.Plan.parse("data(2)").to_yaml()
    step, _ = make_step_of(plan)
    assert step.local_ranks.precision == plan.precision
    with pytest.raises(cp.PlanError, match="precision=fp16 was given, but the plan has precision bf16"):
        make_step_of(plan, precision="fp16")
    with pytest.raises(cp.PlanError, match=re.escape("plan.yaml:3: precision 'bf17' is not one of")):
        cp.Plan.from_yaml("plan:\n  strategy: solo\n  precision: bf17\n", "plan.yaml")


@pytest.mark.parametrize("other", [None, Precision("fp16")])
def test_ranks_compare_the_precisions_of_their_plan_files(other):
    plan = replace(cp.Plan.parse("data(2)"), precision=Precision("bf16"))
    own, theirs = (RequestedPlan(one).describe(one, None) for one in (plan, replace(plan, precision=other)))
    text = f"the precision of the plan is bf16 on rank 0, {other} on rank 1"
    assert first_difference([own, theirs]).startswith(text)


def test_precisions_that_differ_are_named_before_the_loss_scale_that_one_of_them_has():
    plan = cp.Plan.parse("data(2)")
    options = (use_plan_options(TrainingOptions(precision=text), plan) for text in ("bf16", "fp16"))
    text = "the option precision is bf16 on rank 0, fp16 on rank 1; give the same value on all of them"
    assert first_difference([*map(describe_options, options)]) == text


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ({"precision": "bf16(norms=compute)"}, {"precision": Precision("bf16", norms="compute")}),
        ({"precision": torch.float16}, {"precision": "fp16"}),
        ({"loss_scale": "dynamic"}, {"loss_scale": cp.DynamicLossScale()}),
        ({"loss_scale": 8}, {"loss_scale": 8.0}),
        ({"clip_norm": 1}, {"clip_norm": 1.0}),
    ],
)
def test_two_ways_to_write_an_option_are_the_same_to_other_ranks(own, other):
    assert describe_options(TrainingOptions(**own)) == describe_options(TrainingOptions(**other))
    assert describe_options(TrainingOptions(**own)) != describe_options(TrainingOptions())


def make_step_of(plan, **options):
    model = build("mlp")
    return cp.parallelize(
        model, optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, strategy=plan, **options
    ), model


@pytest.mark.parametrize(
    "text",
    ["bf16", "fp32(reduce=fp16)", "fp16(autocast=true)", "bf16(norms=compute, output=compute, reduce=bf16)", MASTERS],
)
def test_the_text_of_a_precision_is_read_as_it_is_written(text):
    assert str(parse_precision(text)) == text
    assert parse_precision(torch.bfloat16) == Precision("bf16")


def test_checkpoint_files_hold_no_narrow_weights(tmp_path):
    with make_trainer("zero(2, level=3)", mlp().float(), precision="bf16") as trainer:
        trainer.fit(dataset_of(torch.float32), batch_size=12, epochs=1, checkpoint_dir=tmp_path / "saved")
    cp.export_checkpoint(tmp_path / "saved", tmp_path / "exported")
    weights = torch.load(tmp_path / "exported" / "model.pt", weights_only=True)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def dataset_of(dtype):
    inputs, targets = dataset().tensors
    return torch.utils.data.TensorDataset(inputs.to(dtype), targets)
