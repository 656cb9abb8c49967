"""Coded sums of whole steps: the bytes that pass, what stays behind, and what a step that is left out changes."""

from fractions import Fraction

import pytest
import torch

from tests.runtime.local_ranks import build_team, chain, flat_params_of, make_batch

CODES = ["fp16", "bf16", "int8", "twobit:0.01", "sign", "topk:0.1", "powersgd:2"]


class Counting:
    """A fabric that adds up what a ring sends of each gradient; all else is the fabric's own."""

    def __init__(self, fabric):
        self.fabric = fabric
        self.sent = Fraction(0)

    def __getattr__(self, name):
        return getattr(self.fabric, name)

    def all_reduce(self, label, tensor, group):
        self.sent += Fraction(2 * (len(group) - 1), len(group)) * tensor.numel() * tensor.element_size()
        return self.fabric.all_reduce(label, tensor, group)

    def all_gather(self, label, whole, bounds, group):
        self.sent += Fraction(len(group) - 1, len(group)) * whole.numel() * whole.element_size()
        return self.fabric.all_gather(label, whole, bounds, group)


def left_of(one):
    """What every rank has left unsent, cloned."""
    return [
        left.residual.clone()
        for rank in one.ranks.values()
        for arena in flat_params_of(rank)
        for left in arena.left.values()
        if left.residual is not None
    ]


def applied_in(plan, **options):
    """The flat gradient with which rank 0 updates in its first step, and what all ranks have left unsent."""
    with build_team(plan, share_params_on_host=False, **options) as one:
        interpreter, seen = one.ranks[0].interpreter, []
        update = interpreter.update

        def watch(units):
            seen.append(torch.cat([arena.collect_flat_grad().clone() for arena in flat_params_of(one.ranks[0])]))
            update(units)

        interpreter.update = watch
        one.step(0, make_batch(2))
        return seen[0], left_of(one)


def weights(rank):
    return torch.cat([arena.weights for arena in flat_params_of(rank)])


@pytest.mark.parametrize("options", [*(f"compress={code}" for code in CODES), "reduce=adasum"])
def test_the_bytes_that_pass_are_those_of_the_formula(options):
    with build_team(f"data(3, {options})") as one:
        spies = [Counting(rank.interpreter.fabric) for rank in one.ranks.values()]
        for rank, spy in zip(one.ranks.values(), spies, strict=True):
            rank.interpreter.communication.fabric = spy
        one.step(0, make_batch(3))
        assert tuple(spy.sent for spy in spies) == one.compiled.cost.sent_bytes()


@pytest.mark.parametrize("code", CODES)
def test_all_replicas_come_to_the_same_bits(code):
    with build_team(f"data(3, compress={code})") as one:
        for number in range(4):
            one.step(number, make_batch(3, 7))
        first, *others = [weights(rank) for rank in one.ranks.values()]
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("code", CODES[2:])
def test_what_is_applied_and_what_stays_is_what_the_replicas_had(code):
    """The gradients of the first step are those of the same step without a code."""
    plain, _ = applied_in("data(2)")
    applied, unsent = applied_in(f"data(2, compress={code})")
    assert len(unsent) == 2
    assert torch.allclose(applied + unsent[0] + unsent[1], plain, rtol=0, atol=1e-16)


@pytest.mark.parametrize("code", ["int8", "powersgd:1"])
def test_a_step_that_is_left_out_leaves_what_was_unsent_as_it_was(code):
    def train(broken):
        with build_team(f"data(2, compress={code})", nonfinite="skip") as one:
            for number, inputs in enumerate(
                [make_batch(2), *([poisoned()] if broken else []), make_batch(2), make_batch(2)]
            ):
                one.step(number, inputs)
            return [weights(rank) for rank in one.ranks.values()] + left_of(one)

    for mine, other in zip(train(broken=True), train(broken=False), strict=True):
        assert torch.equal(mine, other)


def poisoned():
    """A batch whose loss is not finite."""
    broken = make_batch(2)
    broken.batch[0][0] = float("nan")
    return broken


@pytest.mark.parametrize("options", [*(f"compress={code}" for code in CODES), "reduce=adasum"])
def test_a_gradient_that_is_not_finite_is_seen_through_a_code(options):
    with build_team(
        f"data(2, {options})", nonfinite="skip", check_finite="gradients", share_params_on_host=False
    ) as one:
        param = one.ranks[1].interpreter.store.params["0.0.weight"]
        hook = param.register_hook(lambda gradient: gradient.clone().fill_diagonal_(float("inf")))
        assert one.step(0, make_batch(2)).skip_reason.startswith("a gradient on rank 0 is not finite")
        hook.remove()
        assert one.step(1, make_batch(2)).skip_reason == ""


def test_clipping_is_by_the_norm_of_what_is_applied():
    plain, _ = applied_in("data(2, compress=sign)")
    clipped, _ = applied_in("data(2, compress=sign)", clip_norm=1e-3)
    assert torch.allclose(clipped, plain * 1e-3 / (plain.norm() + 1e-6), rtol=1e-12)


def test_a_sum_with_no_code_keeps_nothing():
    with build_team("data(2)", share_params_on_host=False) as one:
        one.step(0, make_batch(2))
        assert left_of(one) == []


def test_a_gradient_of_zeros_does_not_stop_a_factor_for_good():
    """Its factors would stay zero ever after: the next step starts with fresh columns where one has become nothing."""
    model = chain(2)
    for layer in model:
        layer[0].bias.data.zero_()
    with build_team("data(2, compress=powersgd:1)", model=model) as one:
        empty = make_batch(2)
        for tensor in empty.batch:
            tensor.zero_()
        one.step(0, empty)
        before = weights(one.ranks[0]).clone()
        for number in range(1, 4):
            one.step(number, make_batch(2))
        assert (weights(one.ranks[0]) - before).abs().max() > 1e-4
