"""Gradients of matrices are written to their sink, unless the user has a hook on the weight."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from counterpoint.runtime.autograd.deferred_weight_grad import build_grad_sinks
from tests.runtime.local_ranks import WIDTH, build_local_ranks, make_batch

WIDE = 512
MATRIX = (WIDE, WIDE)


def wide():
    torch.manual_seed(0)
    widths = [WIDTH, WIDE, WIDE, WIDE, WIDTH]
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths))).double()


class CopyCounter(TorchDispatchMode):
    """Counts tensors of a matrix's shape that are copied or added to another one."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_move = func in {torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor, torch.ops.aten.clone.default}
        self.count += is_move and tuple(args[0].shape) == MATRIX
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("plan", "micros"), [("solo", 3), ("data(2)", 2), ("zero(2, level=2)", 2), ("pipeline(2, schedule=gpipe)", 3)]
)
def test_no_gradient_of_a_matrix_is_copied_or_added_to_another(plan, micros):
    with build_local_ranks(
        plan, num_microbatches=micros, model=wide(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
    ) as local_ranks:
        local_ranks.step(0, make_batch(local_ranks.plan.global_num_microbatches))
        with CopyCounter() as copies:
            local_ranks.step(1, make_batch(local_ranks.plan.global_num_microbatches))
        assert copies.count == 0


@pytest.mark.filterwarnings("ignore:.* has a gradient hook, which is called for each of 2 microbatches")
@pytest.mark.parametrize("plan", ["solo", "zero(2, level=2)"])
def test_a_hook_on_a_weight_is_called_with_its_gradient(plan):
    with build_local_ranks(plan, num_microbatches=2, model=wide()) as local_ranks:
        store, shapes = local_ranks.ranks[0].interpreter.store, []
        param = next(param for param in store.params.values() if tuple(param.shape) == MATRIX)
        param.register_hook(lambda gradient: shapes.append(gradient.shape))
        assert id(param) not in build_grad_sinks(store, None).weight_sinks
        local_ranks.step(0, make_batch(local_ranks.plan.global_num_microbatches))
    assert set(shapes) == {MATRIX}


def test_weights_with_several_versions_are_left_to_autograd():
    with build_local_ranks("pipedream(2)", num_microbatches=2, model=wide()) as local_ranks:
        store = local_ranks.ranks[0].interpreter.store
        assert store.weight_versions is not None
        assert not build_grad_sinks(store, None).weight_sinks


def test_small_weights_are_left_to_autograd():
    with build_local_ranks("solo") as local_ranks:
        assert not build_grad_sinks(local_ranks.ranks[0].interpreter.store, None).weight_sinks
