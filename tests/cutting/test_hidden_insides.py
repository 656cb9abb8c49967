"""Models whose inside a cut cannot see as it is: scripts, a forward inside autocast, one layer for three."""

import copy
import warnings

import pytest
import torch
from torch import nn

from counterpoint.cutting.choose import cut_model
from counterpoint.cutting.graph import GraphCut
from counterpoint.cutting.slices import verify_split
from counterpoint.errors import PlanError
from tests.cutting.same import owned, seed


def script(*, dropout=0.0):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated
        return torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.Dropout(dropout)))


def test_a_script_without_a_signature_runs_whole():
    """A copy of a script has none, as one loaded from a file."""
    model, inputs = copy.deepcopy(script()), (torch.randn(4, 3),)
    (output,) = cut_model(model, inputs, need="none").segment(0, 1, training=True)(inputs, *owned(model), seed)
    assert torch.equal(output, model(*inputs))


@pytest.mark.parametrize(("dropout", "need"), [(0.0, "chain"), (0.0, "regions"), (0.5, "none")])
def test_a_script_is_refused_where_its_inside_must_be_seen(dropout, need):
    with pytest.raises(PlanError, match=r"^RecursiveScriptModule is a TorchScript module, .* pass the module that it"):
        cut_model(script(dropout=dropout), (torch.randn(4, 3),), need=need)


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layers(x)


@pytest.mark.parametrize("need", ["chain", "regions"])
def test_a_forward_inside_autocast_is_refused_by_that_name(need):
    with pytest.raises(
        PlanError, match=r"^all of Wrapped.forward runs inside torch.autocast, .* in the forward of eac"
    ):
        cut_model(Wrapped(), (torch.randn(4, 3),), need=need)


def test_query_key_and_value_from_one_layer_are_not_taken_for_three_heads():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    cut = GraphCut(model, (torch.randn(3, 5, 8),), prefer="regions")
    split = next(piece.split for piece in cut.spec.pieces if piece.split is not None)
    assert (split.dim, split.size) == ("heads", 2)
    with pytest.raises(PlanError, match=r"as one layer for query, key and value together does, .* write separate"):
        verify_split(cut, cut.spec.refine(("heads",), 2), dict(model.named_parameters()))
