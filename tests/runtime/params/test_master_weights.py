"""``precision="bf16(reduce=bf16, weights=compute)"``: whole weights and gradients in bf16, master weights of shards."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.func import functional_call

from counterpoint.errors import DataError, PlanError
from counterpoint.fabric.reductions import reduce_in_order
from counterpoint.runtime.loss.loss_scale import DynamicLossScale
from counterpoint.runtime.rank_builder import require_read_as_held
from tests.runtime.local_ranks import ADAMW, build_local_ranks, chain, flat_params_of, make_batch, storage_bytes
from tests.runtime.params.test_gathers_in_compute_dtype import Penalized, ReadsItself, with_norm, with_penalty
from tests.runtime.params.test_reductions_in_reduce_dtype import NARROW, WIDE, steps

HELD, REDUCED = "bf16(reduce=bf16, weights=compute)", "bf16(reduce=bf16)"
LEVELS = ["zero(2, level=1)", "zero(2, level=2)"]


class Tied(nn.Module):
    """Traced: the first and the last layer have one weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.middle.weight.requires_grad = False
        self.double()

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Lookup(nn.Module):
    """An embedding whose table is the weight of the last layer, too: it is looked up without a cast."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm, self.middle = nn.Embedding(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.table.weight
        self.double()

    def forward(self, x):
        return self.last(self.norm(self.middle(self.table(x.argmax(dim=1)))))


class Unsplit(nn.Module):
    """A model that stays whole, because its forward depends on values."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

    def forward(self, x):
        hidden = self.first(x)
        return self.last(-hidden if float(hidden.detach().sum()) > 1e9 else hidden)


def pair():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()


MODELS = {"norm": with_norm, "tied": Tied, "lookup": Lookup, "unsplit": Unsplit, "penalty": with_penalty}


def equal(mine, theirs):
    return mine[0] == theirs[0] and all(torch.equal(mine[1][name], value) for name, value in theirs[1].items())


@pytest.mark.long(quick=["zero(2, level=1)-norm", "zero(2, level=2)-tied", "zero(2, level=2)-unsplit"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("plan", LEVELS)
def test_with_one_microbatch_the_bits_are_those_of_whole_weights_in_their_own_dtype(plan, model):
    assert equal(steps(plan, HELD, model=MODELS[model]()), steps("data(2)", REDUCED, model=MODELS[model]()))


@pytest.mark.long(quick=["zero(2, level=2) * data(2)-zero(2, level=3) * data(2)"])
@pytest.mark.parametrize(
    ("plan", "other"),
    [
        ("data(2)", "data(2)"),
        ("zero(4, level=2)", "data(4)"),
        ("zero(2, level=2) * data(2)", "zero(2, level=3) * data(2)"),
        ("pipeline(2) * zero(2, level=1)", "pipeline(2) * zero(2, level=1)"),
        ("pipeline(2) * zero(2, level=2)", "pipeline(2) * data(2)"),
        ("pipeline(2) * data(2)", "pipeline(2) * data(2)"),
        ("tensor(2) * zero(2, level=1)", "tensor(2) * data(2)"),
        ("solo", "solo"),
    ],
)
def test_other_plans_have_the_same_bits_too(plan, other):
    model = pair if "tensor" in plan else with_norm
    assert equal(steps(plan, HELD, model=model()), steps(other, REDUCED, model=model()))


@pytest.mark.long(quick=["clip_value"])
@pytest.mark.parametrize(
    "options",
    [{"passes": ("overlap",)}, {"passes": ("recompute",)}, {"clip_value": 0.01}, {"clip_norm": 0.1}],
    ids=["overlap", "recompute", "clip_value", "clip_norm"],
)
def test_reductions_that_overlap_and_clipped_gradients_have_the_same_bits(options):

    def train(text, **options):
        return steps(LEVELS[1], text, model=with_norm(), optimizer=lambda params: optim.SGD(params, lr=0.1), **options)

    held = train(HELD, **options)
    assert equal(held, train(REDUCED, **options))
    assert ("clip" in str(options)) is not equal(held, train(HELD))


def plain_loop(num_micros, *, every_backward, num_steps=3):
    """Train as two ranks do that add up gradients in bf16: those of microbatches, or their sums over ranks."""
    model, batch = chain(4), make_batch(2 * num_micros)
    params, optimizer = dict(model.named_parameters()), ADAMW(model.parameters())
    for _ in range(num_steps):
        grads: list[list[list[torch.Tensor]]] = [[], []]
        for micro in range(2 * num_micros):
            held = {name: param.detach().bfloat16().requires_grad_() for name, param in params.items()}
            output = functional_call(model, held, (batch.inputs(micro).bfloat16(),)).float()
            loss = F.mse_loss(output, batch.targets(micro)) / (2 * num_micros)
            grads[micro // num_micros].append(list(torch.autograd.grad(loss, list(held.values()))))
        for own in grads if not every_backward else ():
            own[:] = [[sum(parts) for parts in zip(*own, strict=True)]]
        for place, param in enumerate(params.values()):
            pairs = [[micro[place] for micro in both] for both in zip(*grads, strict=True)]
            param.grad = torch.as_tensor(sum(reduce_in_order(pair, "sum") for pair in pairs)).double()
        optimizer.step()
    return params


@pytest.mark.parametrize(("plan", "every_backward"), [(LEVELS[0], False), (LEVELS[1], True)])
def test_gradients_of_microbatches_are_added_up_in_bf16(plan, every_backward):
    weights = steps(plan, HELD, num_microbatches=4)[1]
    expected = plain_loop(4, every_backward=every_backward)
    other = plain_loop(4, every_backward=not every_backward)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value.detach(), rtol=1e-12, atol=0.0)
    assert any(not torch.equal(other[name], value) for name, value in expected.items())


@pytest.mark.parametrize("plan", LEVELS)
def test_a_rank_holds_narrow_weights_and_gradients_and_master_weights_of_its_shard(plan):
    with build_local_ranks(plan, precision=HELD) as one:
        one.step(0, make_batch(2))
        flats = flat_params_of(one.ranks[1])
        sizes = [sum(flat.layout.num_elements for flat in flats)] + [
            sum(storage_bytes(tensor) for tensor in tensors)
            for tensors in (
                [flat.weights for flat in flats],
                [flat.local_shard for flat in flats],
                [flat.own_grads.flat if flat.own_grads.flat is not None else flat.own_grads.shard for flat in flats],
            )
        ]
        params = one.ranks[1].interpreter.store.params.values()
    count = sizes[0]
    assert sizes == [count, NARROW * count, WIDE * count // 2, NARROW * count // (2 if "level=2" in plan else 1)]
    assert {param.dtype for param in params} == {torch.bfloat16}


def test_norms_and_tables_that_are_looked_up_stay_in_their_own_dtype():
    kinds = []
    for model in (with_norm(), Lookup()):
        with build_local_ranks(LEVELS[0], model=model, precision=HELD) as one:
            kinds.append({name: param.dtype for name, param in one.ranks[0].interpreter.store.params.items()})
    wide, narrow = torch.float64, torch.bfloat16
    first, last = dict.fromkeys(("0.weight", "0.bias"), narrow), dict.fromkeys(("3.weight", "3.bias"), narrow)
    assert kinds[0] == {**first, "1.weight": wide, "1.bias": wide, **last}
    names = {name for name, dtype in kinds[1].items() if dtype == wide}
    assert names == {"table.weight", "norm.weight", "norm.bias"}


def test_a_model_without_weights_that_are_read_as_casts_is_refused():
    seen_to_read_itself = ReadsItself()  # in an evaluation, when its samples were seen to be independent
    for model in (nn.Sequential(nn.LayerNorm(6)).double(), chain(2).bfloat16(), seen_to_read_itself):
        with pytest.raises(PlanError, match=r"the model has none: its parameters are no wider.*drop weights=compute"):
            steps(LEVELS[0], HELD, model=model)


def test_the_gather_after_the_update_sends_half_and_reductions_no_more_than_before():
    (held, reduced), count = (steps(LEVELS[0], text, 1)[2] for text in (HELD, REDUCED)), 4 * (6 * 6 + 6)
    assert (held, reduced) == (2 * NARROW * count, (NARROW + WIDE) * count)


def test_an_all_reduce_of_narrow_gradients_sends_their_bytes():
    """Between shards of replicas, too; transports' own all-reduces send 32 bits."""
    for plan in ("data(2)", "data(4)", "zero(2, level=2) * data(2)"):
        held, reduced = (steps(plan, text, 1)[2] for text in (HELD, REDUCED))
        assert held <= reduced


FP16 = "fp16(reduce=fp16, weights=compute)"


@pytest.mark.parametrize("plan", LEVELS)
def test_a_skipped_step_changes_no_bit_and_scaled_gradients_are_unscaled_in_the_master_dtype(plan):
    """With gradients below 6e-8, which a division in fp16 would lose."""
    options = {"loss_scale": DynamicLossScale(init_scale=2.0**40), "optimizer": lambda ps: optim.SGD(ps, lr=1e3)}
    with build_local_ranks(plan, precision=FP16, **options) as one:
        flats, batch = flat_params_of(one.ranks[0]), make_batch(2)
        before = [flat.weights.clone() for flat in flats]
        result = one.step(0, batch)
        assert result.nonfinite == "gradients"
        assert all(map(torch.equal, before, [flat.weights for flat in flats]))
    held, reduced = (steps(plan, text, 30, **options) for text in (FP16, "fp16(reduce=fp16)"))
    assert equal(held, reduced)
    assert held[0][0] != held[0][-1]


def test_gradients_that_are_read_after_a_step_are_scaled_and_wide():
    grads = []
    for text in (HELD, REDUCED):
        with build_local_ranks(LEVELS[1], model=with_norm(), precision=text, clip_norm=0.01) as one:
            one.step(0, make_batch(2))
            grads.append(one.step_gradients.read())
    assert all(torch.equal(grads[0][name], value) for name, value in grads[1].items())
    assert {value.dtype for value in grads[0].values()} == {torch.float64}


def evaluate(model, precision, **options):
    with build_local_ranks(LEVELS[1], model=model, precision=precision, **options) as one:
        one.step(0, make_batch(2))
        return sum(parts["loss"].total for parts in one.evaluate(make_batch(2), None, 1).values())


def test_an_evaluation_reads_the_narrow_weights_of_the_last_update():
    assert evaluate(with_norm(), HELD) == evaluate(with_norm(), REDUCED)


def test_an_evaluation_that_reads_master_weights_unseen_is_refused():
    with pytest.raises(PlanError, match=r"reads inner\.weight without a cast in evaluation.*drop weights=compute"):
        evaluate(ReadsItself(), HELD, cross_sample="accept")
    require_read_as_held(["read"], {"read": torch.bfloat16}, {"read": torch.bfloat16, "unread": torch.bfloat16})


def test_a_child_that_begins_to_iterate_over_narrow_weights_is_refused(monkeypatch):
    monkeypatch.setattr(Penalized, "iterates", False)
    with build_local_ranks(LEVELS[0], model=with_penalty(), precision=HELD) as one:
        one.step(0, make_batch(2))
        monkeypatch.setattr(Penalized, "iterates", True)
        with pytest.raises(DataError, match=r"without a cast.*a precision without weights=compute"):
            one.step(1, make_batch(2))


def test_a_model_that_cannot_be_split_stays_whole_and_is_copied():
    with build_local_ranks(LEVELS[1], model=Unsplit(), precision=HELD) as one:
        assert len(one.compiled.model.blocks) == 1
        assert {param.dtype for param in one.model.parameters()} == {torch.float64}
    with build_local_ranks(LEVELS[1], precision=HELD) as one:
        assert len(one.compiled.model.blocks) == 4


def test_hooks_on_parameters_of_which_one_rank_trains_narrow_ones_are_refused():
    """One rank with a whole model trains its own parameters otherwise."""
    model = Unsplit()
    model.first.weight.register_hook(lambda grad: 2 * grad)
    with pytest.raises(PlanError, match=r"first\.weight has a gradient hook, which under solo would not see"):
        steps("solo", HELD, model=model)
    assert steps("solo", REDUCED, 1, model=model)


@pytest.mark.parametrize("plan", ["zero(2, level=3)", "zero(2, level=3, reshard_after_forward=off) * data(2)"])
def test_level_3_is_refused_because_it_keeps_no_whole_weights(plan):
    with pytest.raises(
        PlanError, match=r"weights=compute is for whole weights.*drop weights, or give zero\(\.\.\., lev"
    ):
        steps(plan, HELD)


@pytest.mark.parametrize("plan", ["server(2)", "data(2, sync_every=2)", "pipedream(2)", "data(2, compress=bf16)"])
def test_plans_that_sum_gradients_otherwise_are_refused(plan):
    with pytest.raises(PlanError, match=r"precision with reduce=bf16 .* is for gradients that"):
        steps(plan, HELD)
