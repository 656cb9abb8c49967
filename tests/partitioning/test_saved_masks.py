"""Graphs of a forward and its backward do not store masks of values that the forward returns."""

import pytest
import torch
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F

from counterpoint.partitioning.saved_masks import inductor_options, recompute_masks


def stored(function, *, is_marked=True):
    """Return the dtypes of what the forward of a function of a vector returns: its outputs, and what it stores."""
    dtypes = []

    def partition(joint, *args, **kwargs):
        if is_marked:
            recompute_masks(joint.graph)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def note(graph, _):
        (output,) = graph.graph.find_nodes(op="output")
        dtypes.append([node.meta["val"].dtype for node in output.args[0]])
        return graph.forward

    table = select_decomp_table()
    compiled = aot_function(function, note, lambda graph, _: graph.forward, partition, decompositions=table)
    x, expected = (torch.arange(-3.0, 4.0, requires_grad=True) for _ in range(2))
    compiled(x).square().sum().backward()
    function(expected).square().sum().backward()
    torch.testing.assert_close(x.grad, expected.grad, rtol=0, atol=0)
    return dtypes[0]


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("end", [F.relu, lambda x: x.sin().relu()], ids=["relu", "sin and relu"])
def test_the_mask_of_an_output_is_not_stored(end):
    assert torch.bool in stored(end, is_marked=False)
    assert torch.bool not in stored(end)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("end", [lambda x: x.clamp(min=0), lambda x: x.relu().sum()], ids=["of an input", "of a part"])
def test_other_masks_are_stored(end):
    """To keep their value for the backward would take more memory."""
    assert torch.bool in stored(end)


def test_options_are_those_of_the_mode():
    assert inductor_options("max-autotune-no-cudagraphs").keys() > inductor_options(None).keys()
    with pytest.raises(RuntimeError, match="Unrecognized mode=fast"):
        inductor_options("fast")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(None, False), ("max-autotune-no-cudagraphs", False), ("reduce-overhead", True), ("max-autotune", True)],
)
def test_cuda_graphs_are_used_in_the_modes_that_have_them(mode, expected):
    assert inductor_options(mode).get("triton.cudagraphs", False) == expected
