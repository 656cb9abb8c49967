"""``precision="fp32(reduce=bf16)"``: gradients travel and are summed over ranks in bf16 or fp16, and nowhere else."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from counterpoint.errors import DataError, PlanError, ProgramError
from counterpoint.fabric.reductions import reduce_in_order
from counterpoint.runtime.loss.loss_scale import DynamicLossScale
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.runtime.params.flat_layout import build_layouts
from counterpoint.runtime.state_dict import gather_weights
from tests.runtime.comm.test_bytes_sent import RingFabric
from tests.runtime.local_ranks import ADAMW, WIDTH, build_local_ranks, chain, flat_params_of, make_batch

BF16 = "fp32(reduce=bf16)"
NUM_WEIGHTS = 4 * (WIDTH * WIDTH + WIDTH)
WIDE, NARROW = torch.float64.itemsize, torch.bfloat16.itemsize


def steps(plan, precision=BF16, num_steps=3, model=None, **options):
    """Return the losses of a few steps, the weights after them, and the bytes that all ranks have sent."""
    with build_local_ranks(plan, model=model, precision=precision, **options) as one:
        for rank in one.ranks.values():
            rank.interpreter.communication.fabric = RingFabric(rank.interpreter.fabric)
        batch = make_batch(one.global_num_microbatches)
        losses = [one.step(number, batch).loss for number in range(num_steps)]
        sent = sum(rank.interpreter.communication.fabric.sent for rank in one.ranks.values())
        shard_map = one.shard_map()
        weights = one.world.run(lambda fabric: gather_weights(shard_map, one.ranks[fabric.rank], fabric))[0]
        return losses, weights, sent


def plain_loop(num_micros, dtype, *, every_backward, num_steps=3):
    """Train as two ranks do: sum their gradients in a narrower dtype, after the last backward or after each."""
    model, batch = chain(4), make_batch(2 * num_micros)
    params, optimizer = list(model.parameters()), ADAMW(model.parameters())
    for _ in range(num_steps):
        grads: list[list[list[torch.Tensor]]] = [[], []]
        for micro in range(2 * num_micros):
            loss = F.mse_loss(model(batch.inputs(micro)), batch.targets(micro)) / (2 * num_micros)
            grads[micro // num_micros].append(torch.autograd.grad(loss, params))
        for own in grads if not every_backward else ():
            own[:] = [[sum(parts) for parts in zip(*own, strict=True)]]
        for place, param in enumerate(params):
            pairs = [[micro[place].to(dtype) for micro in both] for both in zip(*grads, strict=True)]
            param.grad = sum(reduce_in_order(pair, "sum").double() for pair in pairs)
        optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.long(quick=["data(2, update=sharded)-False-fp16-dtype1", "zero(2, level=2)-True-bf16-dtype0"])
@pytest.mark.parametrize(("text", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize(
    ("plan", "every_backward"),
    [
        ("data(2)", False),
        ("data(2, update=sharded)", False),
        ("zero(2)", False),
        ("zero(2, level=2)", True),
        ("zero(2, level=3)", True),
    ],
)
def test_weights_are_those_of_a_plain_loop_that_casts_each_ranks_gradient(plan, every_backward, text, dtype):
    """Gradients of microbatches are added up in float64, before the cast or after it."""
    weights = steps(plan, f"fp32(reduce={text})", num_microbatches=2, loss_scale=1.0)[1]
    expected = plain_loop(2, dtype, every_backward=every_backward)
    other = plain_loop(2, dtype, every_backward=not every_backward)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value.detach(), rtol=1e-12, atol=0.0)
    assert any(not torch.equal(other[name], value) for name, value in expected.items())


@pytest.mark.long(quick=["zero(2, level=3) * data(2)-4"])
@pytest.mark.parametrize(
    ("plan", "volume"),
    [
        ("data(2)", 2),
        ("data(4)", 6),
        ("data(2, update=sharded)", 1),
        ("zero(2)", 1),
        ("zero(2, level=2)", 1),
        ("zero(2, level=3)", 1),
        ("pipeline(2) * data(2)", 2),
        ("data(2) * zero(2, level=2)", 4),
        ("zero(2, level=3) * data(2)", 4),
    ],
)
def test_gradients_are_sent_with_the_bytes_of_the_reduce_dtype(plan, volume):
    """The volume is what all ranks send of gradients, in gradients of the model; the rest stays as it is."""
    wide, narrow = (steps(plan, text, 1, share_params_on_host=False)[2] for text in (None, BF16))
    assert wide - narrow == volume * NUM_WEIGHTS * (WIDE - NARROW)
    assert narrow > 0


@pytest.mark.long(quick=["pipeline(2) * data(2)"])
@pytest.mark.parametrize("plan", ["data(2)", "data(2) * data(2)", "pipeline(2) * data(2)"])
def test_reductions_that_overlap_with_the_backward_give_the_same_bits(plan):
    plain, overlapped = (steps(plan, passes=passes)[:2] for passes in ((), ("overlap",)))
    assert plain[0] == overlapped[0]
    assert all(torch.equal(plain[1][name], value) for name, value in overlapped[1].items())


class RememberingFabric:
    """A fabric that remembers the narrow tensors it sends, but does not keep them."""

    def __init__(self, fabric):
        self.fabric, self.reduced = fabric, []

    def __getattr__(self, name):
        return getattr(self.fabric, name)

    def all_reduce(self, label, whole, group):
        return self.remember(whole) or self.fabric.all_reduce(label, whole, group)

    def reduce_scatter(self, label, whole, bounds, group):
        return self.remember(whole) or self.fabric.reduce_scatter(label, whole, bounds, group)

    def all_gather(self, label, whole, bounds, group):
        return self.remember(whole) or self.fabric.all_gather(label, whole, bounds, group)

    def remember(self, whole):
        if whole.dtype == torch.bfloat16:
            self.reduced.append(weakref.ref(whole))


@pytest.mark.parametrize("passes", [(), ("overlap",)])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_nothing_narrow_is_left_between_steps_and_gradients_are_not_shared(num_ranks, passes):
    with build_local_ranks(f"data({num_ranks})", precision=BF16, passes=passes) as one:
        communication = one.ranks[0].interpreter.communication
        communication.fabric = communication.overlap.fabric = fabric = RememberingFabric(communication.fabric)
        for number in range(3):
            one.step(number, make_batch(num_ranks))
        assert fabric.reduced
        assert all(tensor() is None for tensor in fabric.reduced)
        assert not any(flat_params.grads.is_shared for flat_params in flat_params_of(one.ranks[0]))


@pytest.mark.parametrize("passes", [(), ("overlap",)])
def test_gradients_of_weights_in_bf16_are_reduced_as_casts_are(passes):
    """Transports' own all-reduces may send 32 bits for them."""

    def batch(num_micros):
        inputs, targets = (torch.ones(num_micros, WIDTH).bfloat16() for _ in range(2))
        return SlicedBatch((inputs, targets), tuple((index, index + 1) for index in range(num_micros)))

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).bfloat16()
    with build_local_ranks("data(2)", model=model, passes=passes, batches=batch, share_params_on_host=False) as one:
        communication = one.ranks[0].interpreter.communication
        communication.fabric = communication.overlap.fabric = fabric = RememberingFabric(communication.fabric)
        one.step(0, batch(2))
    assert fabric.reduced


OVERFLOWING = "the sum of gradients over microbatches and ranks is not finite on rank 0, although they are"
FP16 = "fp32(reduce=fp16)"


@pytest.mark.long(quick=["zero(2, level=2)"])
@pytest.mark.parametrize("plan", ["data(2)", "zero(2, level=2)", "zero(2, level=3)", "pipeline(2) * data(2)"])
def test_a_sum_that_overflows_in_fp16_skips_the_step_on_all_ranks(plan):
    """The loss scale is halved until the sum fits: that step is the first one with this scale."""
    with build_local_ranks(plan, precision=FP16, loss_scale=DynamicLossScale(init_scale=2.0**30)) as one:
        batch = make_batch(one.global_num_microbatches)
        reasons = [one.step(number, batch).skip_reason for number in range(20)]
        scales = {rank.interpreter.state.loss_scaler.scale for rank in one.ranks.values()}
    num_skipped = reasons.index("")
    assert num_skipped > 3
    assert all("the sum of gradients over microbatches and ranks" in reason for reason in reasons[:num_skipped])
    assert not any(reasons[num_skipped:])
    assert scales == {2.0 ** (30 - num_skipped)}
    fitting = steps(plan, FP16, 20 - num_skipped, loss_scale=2.0 ** (30 - num_skipped))[1]
    dynamic = steps(plan, FP16, 20, loss_scale=DynamicLossScale(init_scale=2.0**30))[1]
    assert all(torch.equal(fitting[name], value) for name, value in dynamic.items())


def test_a_sum_that_overflows_at_a_static_scale_is_an_error():
    with pytest.raises(DataError, match=OVERFLOWING):
        steps("data(2)", FP16, 1, loss_scale=2.0**30)
    assert steps("data(2)", BF16, 1, loss_scale=2.0**30)[0]


def test_gradients_in_fp16_have_a_dynamic_loss_scale_unless_another_is_given():
    for text, expected in ((FP16, 2.0**16), (BF16, 1.0)):
        with build_local_ranks("data(2)", precision=text) as one:
            assert one.ranks[0].interpreter.state.loss_scaler.scale == expected


def test_gradients_that_are_no_wider_keep_their_dtype():
    model = nn.Sequential(nn.Linear(6, 6).bfloat16(), nn.Linear(6, 6).double())
    params = [(name, tuple(param.shape), param.dtype, 0) for name, param in model.named_parameters()]
    layouts = build_layouts(params, split_size=1, reduce_dtype=torch.float16)
    assert [layout.reduce_dtype for layout in layouts] == [None, torch.float16]


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, WIDTH, sparse=True, dtype=torch.float64)

    def forward(self, x):
        return self.table(x.argmax(dim=1))


@pytest.mark.parametrize(
    ("plan", "match"),
    [
        ("data(2, staleness=1)", "under data.* apply gradients of several steps"),
        ("data(2, sync_every=2)", "or replicas have weights of their own"),
        ("server(2, consistency=asp)", "ranks or servers apply gradients of several steps"),
        ("server(2)", "send them to a server or along a tree, in their own dtype"),
        ("tree(2)", "send them to a server or along a tree, in their own dtype"),
        ("pipedream(2)", "apply gradients of several steps"),
        ("data(2, compress=int8)", r"but data\(2, compress=int8\) reduces them with int8; give one of the two"),
        ("data(2, reduce=adasum)", "reduces them with adasum; give one of the two"),
        ("data(2, compress=powersgd:1, compress_from=2)", "reduces them with powersgd:1; give one of the two"),
    ],
)
def test_plans_whose_gradients_would_travel_otherwise_are_refused(plan, match):
    with pytest.raises(PlanError, match=f"precision with reduce=bf16 .* is for gradients that.*{match}"):
        steps(plan)


def test_sparse_gradients_are_refused():
    with pytest.raises(PlanError, match=r"the gradient of table\.weight is sparse, and its rows travel in their own"):
        steps("data(2)", model=Lookup(), optimizer=torch.optim.SGD)


class ComplexScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1 + 2j, dtype=torch.complex128))

    def forward(self, x):
        return (self.layer(x) * self.scale).abs()


def test_complex_gradients_are_not_cast_which_would_lose_their_imaginary_parts():
    params = [("scale", (4,), torch.complex64, 0), ("weight", (4,), torch.float32, 0)]
    layouts = build_layouts(params, split_size=1, reduce_dtype=torch.bfloat16)
    assert [layout.reduce_dtype for layout in layouts] == [None, torch.bfloat16]
    with pytest.raises(ProgramError, match="complex128 cannot be reduced; keep a complex parameter as a real one of"):
        steps("zero(2)", model=ComplexScale(), share_params_on_host=False)


def test_one_rank_sums_nothing():
    assert steps("solo")[0] == steps("solo", None)[0]
