"""Compressed all-reduces of whole steps: bytes sent, error feedback, and what a skipped step changes."""

from fractions import Fraction

import pytest
import torch

from tests.runtime.local_ranks import build_local_ranks, chain, flat_params_of, make_batch

CODECS = ["fp16", "bf16", "int8", "twobit:0.01", "sign", "topk:0.1", "powersgd:2"]


class RingCountingFabric:
    """A fabric that counts the bytes that a ring would send of each gradient."""

    def __init__(self, fabric):
        self.fabric = fabric
        self.sent = Fraction(0)

    def __getattr__(self, name):
        return getattr(self.fabric, name)

    def all_reduce(self, label, tensor, group):
        self.sent += Fraction(2 * (len(group) - 1), len(group)) * tensor.numel() * tensor.element_size()
        return self.fabric.all_reduce(label, tensor, group)

    def reduce_scatter(self, label, whole, bounds, group):
        self.sent += Fraction(len(group) - 1, len(group)) * whole.numel() * whole.element_size()
        return self.fabric.reduce_scatter(label, whole, bounds, group)

    def all_gather(self, label, whole, bounds, group):
        self.sent += Fraction(len(group) - 1, len(group)) * whole.numel() * whole.element_size()
        return self.fabric.all_gather(label, whole, bounds, group)


def residuals_of(one):
    """Return copies of all residuals."""
    return [
        error_feedback.residual.clone()
        for rank in one.ranks.values()
        for flat_params in flat_params_of(rank)
        for error_feedback in flat_params.error_feedbacks.values()
        if error_feedback.residual is not None
    ]


def first_update(plan, **options):
    """Return the flat gradient of rank 0's first update, and the residuals of all ranks."""
    with build_local_ranks(plan, share_params_on_host=False, **options) as one:
        interpreter, grads = one.ranks[0].interpreter, []
        update = interpreter.update

        def watch(units):
            grads.append(
                torch.cat([flat_params.own_grads.collect_all().clone() for flat_params in flat_params_of(one.ranks[0])])
            )
            update(units)

        interpreter.update = watch
        one.step(0, make_batch(2))
        return grads[0], residuals_of(one)


def weights(rank):
    return torch.cat([flat_params.weights for flat_params in flat_params_of(rank)])


@pytest.mark.long(quick=["compress=fp16", "compress=topk:0.1", "compress=sign"])
@pytest.mark.parametrize("options", [*(f"compress={codec}" for codec in CODECS), "reduce=adasum"])
def test_the_bytes_sent_are_those_of_the_formula(options):
    with build_local_ranks(f"data(3, {options})") as one:
        fabrics = [RingCountingFabric(rank.interpreter.fabric) for rank in one.ranks.values()]
        for rank, fabric in zip(one.ranks.values(), fabrics, strict=True):
            rank.interpreter.communication.fabric = fabric
        one.step(0, make_batch(3))
        assert tuple(fabric.sent for fabric in fabrics) == one.compiled.cost.sent_bytes()


@pytest.mark.long(quick=["topk:0.1", "powersgd:2"])
@pytest.mark.parametrize("codec", CODECS)
def test_all_replicas_have_the_same_bits(codec):
    with build_local_ranks(f"data(3, compress={codec})") as one:
        for number in range(4):
            one.step(number, make_batch(3, 7))
        first, *others = [weights(rank) for rank in one.ranks.values()]
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.long(quick=["twobit:0.01", "powersgd:2"])
@pytest.mark.parametrize("codec", CODECS[2:])
def test_the_applied_gradient_plus_residuals_is_the_sum_of_gradients(codec):
    """The gradients of the first step are those of the same step without compression."""
    plain, _ = first_update("data(2)")
    applied, residuals = first_update(f"data(2, compress={codec})")
    assert len(residuals) == 2
    assert torch.allclose(applied + residuals[0] + residuals[1], plain, rtol=0, atol=1e-16)


@pytest.mark.parametrize("codec", ["int8", "powersgd:1"])
def test_a_skipped_step_does_not_change_residuals(codec):
    def train(*, is_broken):
        with build_local_ranks(f"data(2, compress={codec})", nonfinite="skip") as one:
            for number, inputs in enumerate(
                [make_batch(2), *([bad_batch()] if is_broken else []), make_batch(2), make_batch(2)]
            ):
                one.step(number, inputs)
            return [weights(rank) for rank in one.ranks.values()] + residuals_of(one)

    for tensor, other in zip(train(is_broken=True), train(is_broken=False), strict=True):
        assert torch.equal(tensor, other)


def bad_batch():
    """A batch whose loss is not finite."""
    batch = make_batch(2)
    batch.batch[0][0] = float("nan")
    return batch


@pytest.mark.long(quick=["compress=topk:0.1", "compress=powersgd:2", "reduce=adasum", "compress=bf16"])
@pytest.mark.parametrize("options", [*(f"compress={codec}" for codec in CODECS), "reduce=adasum"])
def test_a_gradient_that_is_not_finite_is_seen_through_every_codec(options):
    with build_local_ranks(f"data(2, {options})", nonfinite="skip", share_params_on_host=False) as one:
        param = one.ranks[1].interpreter.store.params["0.0.weight"]
        hook = param.register_hook(lambda gradient: gradient.clone().fill_diagonal_(float("inf")))
        reason = one.step(0, make_batch(2)).skip_reason
        assert reason == "the gradient of 0.0.weight in microbatch 1 on rank 1 is not finite"
        hook.remove()
        assert one.step(1, make_batch(2)).skip_reason == ""


def test_clipping_uses_the_norm_of_the_applied_gradient():
    plain, _ = first_update("data(2, compress=sign)")
    clipped, _ = first_update("data(2, compress=sign)", clip_norm=1e-3)
    assert torch.allclose(clipped, plain * 1e-3 / (plain.norm() + 1e-6), rtol=1e-12)


def test_an_uncompressed_all_reduce_has_no_residual():
    with build_local_ranks("data(2)", share_params_on_host=False) as one:
        one.step(0, make_batch(2))
        assert residuals_of(one) == []


def test_a_zero_gradient_does_not_keep_a_factor_zero_forever():
    """Its factors would stay zero: the next step starts with new columns in place of zero ones."""
    model = chain(2)
    for layer in model:
        layer[0].bias.data.zero_()
    with build_local_ranks("data(2, compress=powersgd:1)", model=model) as one:
        empty = make_batch(2)
        for tensor in empty.batch:
            tensor.zero_()
        one.step(0, empty)
        before = weights(one.ranks[0]).clone()
        for number in range(1, 4):
            one.step(number, make_batch(2))
        assert (weights(one.ranks[0]) - before).abs().max() > 1e-4
