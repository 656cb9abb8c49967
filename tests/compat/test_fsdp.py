"""What a script shards with FSDP2's ``fully_shard`` becomes a plan with the same results, or is refused."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from counterpoint.compat.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    plan_arguments,
    set_modules_to_backward_prefetch,
    set_modules_to_forward_prefetch,
)
from counterpoint.errors import PlanError
from tests.training.trainers import build_seeded, fit, max_difference

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(Layer(8) for _ in range(3))

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sharded(model=None, root=None, **options):
    """Return a model of which each layer, and then the whole, was given."""
    model = build_seeded(Model) if model is None else model
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **(options if root is None else root))


def mesh(*shape):
    return SimpleNamespace(shape=shape)


@pytest.mark.parametrize(
    ("options", "num_ranks", "strategy"),
    [
        ({}, 2, "zero(2, level=3, split_points=layers.0+layers.1+layers.2)"),
        ({"mesh": mesh(4)}, None, "zero(4, level=3, split_points=layers.0+layers.1+layers.2)"),
        ({"mesh": mesh(2, 3)}, 6, "zero(3, level=3, split_points=layers.0+layers.1+layers.2) * data(2)"),
        (
            {"reshard_after_forward": False},
            2,
            "zero(2, level=3, reshard_after_forward=off, split_points=layers.0+layers.1+layers.2)",
        ),
    ],
)
def test_meshes_and_resharding_become_degrees_and_options(options, num_ranks, strategy):
    arguments = plan_arguments(sharded(**options), num_ranks=num_ranks)
    assert arguments == {"strategy": strategy, "passes": ("overlap", "prefetch")}


@pytest.mark.parametrize(
    ("policy", "precision"),
    [
        (MixedPrecisionPolicy(torch.bfloat16), "bf16(norms=compute, output=compute, reduce=bf16)"),
        (BF16, "bf16(norms=compute, output=compute)"),
        (MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32), "bf16(norms=compute)"),
        (MixedPrecisionPolicy(torch.float16), "fp16(norms=compute, output=compute, reduce=fp16)"),
        (MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), "fp32(reduce=bf16)"),
        (MixedPrecisionPolicy(), None),
    ],
)
def test_a_policy_becomes_a_precision(policy, precision):
    assert plan_arguments(sharded(mp_policy=policy), num_ranks=2).get("precision") == precision


def test_torchs_own_policies_are_read():
    from torch.distributed import fsdp

    policies = {
        "mp_policy": fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "offload_policy": fsdp.CPUOffloadPolicy(),
    }
    arguments = plan_arguments(sharded(**policies), num_ranks=2)
    assert arguments["precision"] == "bf16(norms=compute, output=compute)"
    assert arguments["passes"] == ("overlap", "prefetch", "offload:state=host")


def test_the_outermost_module_says_what_the_output_is():
    model = sharded(
        mp_policy=BF16, root={"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)}
    )
    assert plan_arguments(model, num_ranks=2)["precision"] == "bf16(norms=compute)"


def test_modules_of_a_list_are_one_unit():
    model = build_seeded(Model)
    fully_shard([model.layers[1], model.layers[2]])
    assert plan_arguments(fully_shard(model), num_ranks=2)["strategy"] == "zero(2, level=3, split_points=layers.1)"


SETTERS = {"forward": set_modules_to_forward_prefetch, "backward": set_modules_to_backward_prefetch}


def prefetching(listed, *, direction="forward"):
    """Return a model of which the layers of these numbers list layers of others."""
    model = sharded()
    for number, others in listed.items():
        SETTERS[direction](model.layers[number], [model.layers[other] for other in others])
    return model


@pytest.mark.parametrize(
    ("direction", "listed", "prefetch"),
    [
        ("forward", {}, "prefetch"),
        ("forward", {0: [1], 1: [2]}, "prefetch"),
        ("forward", {0: [1, 2]}, "prefetch:2"),
        ("forward", {0: [1, 2], 1: [2]}, "prefetch:2"),
        ("backward", {2: [1, 0], 1: [0]}, "prefetch:2"),
    ],
)
def test_the_number_of_modules_to_prefetch_becomes_the_depth(direction, listed, prefetch):
    arguments = plan_arguments(prefetching(listed, direction=direction), num_ranks=2)
    assert arguments["passes"] == ("overlap", prefetch)


@pytest.mark.parametrize(
    ("direction", "listed", "message"),
    [
        ("forward", {0: [2]}, r"got other modules for layers.0 than those that follow it.*; list layers.1 first"),
        ("forward", {2: [0]}, r"got other modules for layers.2 .*; no module follows it, so do not call it"),
        ("backward", {1: [2]}, r"set_modules_to_backward_prefetch.* for layers.1 .*; list layers.0 first"),
        ("forward", {1: [2, 0]}, "got other modules for layers.1"),
        ("forward", {0: [1]}, r"2 modules are to be prefetched in the forward of the model, and 1 in .* of layers.0"),
        ("forward", {0: []}, "got no modules; list those to gather early, or do not call it"),
    ],
)
def test_modules_that_no_depth_prefetches_are_refused(direction, listed, message):
    def plan():
        model = prefetching(listed, direction=direction)
        set_modules_to_forward_prefetch(model, list(model.layers)[:2])
        return plan_arguments(model, num_ranks=2)

    with pytest.raises(PlanError, match=message):
        plan()


def test_modules_to_prefetch_are_those_that_fully_shard_was_called_on():
    model = sharded()
    with pytest.raises(PlanError, match=r"got a Linear on which fully_shard\(\) was not called"):
        set_modules_to_forward_prefetch(model.layers[0], [model.head])


@pytest.mark.parametrize("options", [{}, {"mesh": mesh(2, 2)}, {"reshard_after_forward": False}], ids=str)
def test_the_weights_are_those_of_a_plain_loop(options):
    weights, history = fit("solo", build_seeded(Model), epochs=2)
    model = sharded(build_seeded(Model), **options)
    arguments = plan_arguments(model, num_ranks=None if "mesh" in options else 2)
    found, other = fit(arguments.pop("strategy"), model, epochs=2, **arguments)
    assert max_difference(found, weights) <= 1e-12
    assert other.losses == pytest.approx(history.losses, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reshard_after_forward": 2}, r"reshard_after_forward=2\) would gather weights .* give True or False"),
        ({"shard_placement_fn": len}, r"shard_placement_fn=...\) is not supported; omit it"),
        ({"ignored_params": set()}, r"ignored_params=...\) is not supported; freeze them"),
        ({"mesh_dim": 1}, "no argument 'mesh_dim'"),
        ({"mesh": mesh(2, 2, 2)}, "a mesh of 3 dimensions"),
        ({"mp_policy": torch.bfloat16}, "got a dtype; give a MixedPrecisionPolicy"),
        ({"mp_policy": MixedPrecisionPolicy(torch.float64)}, "param_dtype=torch.float64; give one of"),
        ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)}, "cast_forward_inputs=False"),
        ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float16)}, "output_dtype=torch.float16"),
        ({"offload_policy": "cpu"}, r"got a str; give OffloadPolicy\(\) or CPUOffloadPolicy\(\)"),
    ],
)
def test_arguments_that_no_plan_has_are_refused(options, message):
    with pytest.raises(PlanError, match=message):
        sharded(**options)


@pytest.mark.parametrize("module", [nn.ModuleList([nn.Linear(1, 1)]), "layers.0", []], ids=["list", "path", "empty"])
def test_what_has_no_forward_is_refused(module):
    with pytest.raises(PlanError, match=r"fully_shard\(\) got"):
        fully_shard(module)


def test_a_module_is_given_once():
    with pytest.raises(PlanError, match="was called on this Layer before"):
        sharded(sharded())


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ({"mp_policy": BF16}, "mp_policy bf16.* for the model, and None for layers.0"),
        ({"mesh": mesh(2)}, r"a mesh of shape \(2,\) for the model, and None for layers.0"),
        ({"offload_policy": CPUOffloadPolicy()}, "offload_policy to the host True for the model"),
    ],
)
def test_modules_that_differ_in_what_a_plan_has_once_are_refused(root, message):
    with pytest.raises(PlanError, match=message):
        plan_arguments(sharded(root=root), num_ranks=2)


def test_layers_that_are_resharded_differently_are_refused():
    model = build_seeded(Model)
    fully_shard(model.layers[0], reshard_after_forward=False)
    fully_shard(model.layers[1])
    with pytest.raises(PlanError, match=r"reshard_after_forward False for layers.0, and True for layers.1"):
        plan_arguments(fully_shard(model), num_ranks=2)


def test_parameters_outside_of_all_modules_are_refused():
    model = build_seeded(Model)
    fully_shard(model.layers[0])
    with pytest.raises(PlanError, match=r"inp.weight and 15 other parameters are in no module .* after its layers"):
        plan_arguments(model, num_ranks=2)
    with pytest.raises(PlanError, match="called on no module of this model"):
        plan_arguments(build_seeded(Model), num_ranks=2)


def test_the_number_of_ranks_has_to_be_known_and_that_of_the_mesh():
    with pytest.raises(PlanError, match=r"the mesh of .* has 4 ranks, but the run has 2"):
        plan_arguments(sharded(mesh=mesh(2, 2)), num_ranks=2)
    with pytest.raises(PlanError, match="give num_ranks= to plan_arguments"):
        plan_arguments(sharded())


def test_a_module_is_no_list_of_modules_to_prefetch():
    model, other = prefetching({}), cast("Any", fully_shard(nn.Linear(2, 2)))
    with pytest.raises(PlanError, match="got a Linear; give a list of modules"):
        set_modules_to_forward_prefetch(model.layers[0], other)
