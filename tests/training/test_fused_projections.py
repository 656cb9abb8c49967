"""One layer for query, key and value: exact under tensor parallelism, or refused with a remedy that runs."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from tests.training.trainers import build_seeded, max_difference, state_of

HEADS, WIDTH = 4, 8
SIZE = WIDTH // HEADS


class Conv1D(nn.Module):
    """A linear layer with the transposed weight, as that of GPT-2 in transformers."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 4)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.size()[:-1], self.nf)


def by_heads(*parts):
    return [part.view(*part.shape[:2], HEADS, SIZE).transpose(1, 2) for part in parts]


FORMS: dict[str, Any] = {
    "chunk": lambda x: by_heads(*x.chunk(3, -1)),
    "split": lambda x: by_heads(*x.split(WIDTH, dim=2)),
    "slices": lambda x: by_heads(*(x[..., start : start + WIDTH] for start in range(0, 3 * WIDTH, WIDTH))),
    "three, heads, size": lambda x: x.view(*x.shape[:2], 3, HEADS, SIZE).permute(2, 0, 3, 1, 4),
    "heads, three sizes": lambda x: x.view(*x.shape[:2], HEADS, 3 * SIZE).transpose(1, 2).chunk(3, -1),
    "separate": None,
}
"""How query, key and value are taken from the output of one layer; nanoGPT and GPT-2 split it, GPT-NeoX has the last."""


class Block(nn.Module):
    """Attention and a pair of layers, which is sharded where the attention is kept whole."""

    def __init__(self, form, layer):
        super().__init__()
        self.form = FORMS[form]
        self.fused = layer(WIDTH, 3 * WIDTH) if self.form is not None else None
        self.parts = nn.ModuleList(layer(WIDTH, WIDTH) for _ in range(0 if self.form is not None else 3))
        self.out, self.wide, self.narrow = layer(WIDTH, WIDTH), layer(WIDTH, 16), layer(16, WIDTH)

    def forward(self, x):
        separate = [part(x) for part in self.parts]
        query, key, value = by_heads(*separate) if self.fused is None else self.form(self.fused(x))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.narrow(torch.tanh(self.wide(x)))


def train(form, layer, strategy, **options):
    """Take two steps; return the model's state and the parameters that are sharded."""
    model = build_seeded(lambda: Block(form, layer))
    inputs = torch.linspace(-1, 1, 4 * 5 * WIDTH, dtype=torch.float64).view(4, 5, WIDTH).sin()
    sgd = optim.SGD(model.parameters(), lr=0.5)
    with cp.parallelize(model, sgd, F.mse_loss, strategy=strategy, **options) as step:
        for _ in range(2):
            step(inputs, inputs.flip(1))
        assert step.local_ranks.compiled is not None
        blocks = step.local_ranks.compiled.model.blocks
    return state_of(model), {name for block in blocks if block.tp for name, _ in block.tp.sharded_dims}


@pytest.mark.long(quick=["split-Linear-False"])
@pytest.mark.parametrize(
    ("form", "layer", "has_sharded_attention"),
    [
        ("chunk", nn.Linear, False),
        ("chunk", Conv1D, False),
        ("split", nn.Linear, False),
        ("split", Conv1D, False),
        ("heads, three sizes", nn.Linear, True),
        ("separate", nn.Linear, True),
    ],
)
def test_a_fused_layer_is_sharded_by_heads_or_kept_whole_and_exact(form, layer, has_sharded_attention):
    found, sharded = train(form, layer, "tensor(2)")
    expected, _ = train(form, layer, "solo")
    assert max_difference(found, expected) <= 1e-12
    assert "wide.weight" in sharded
    assert ("out.weight" in sharded) is has_sharded_attention


@pytest.mark.long(quick=["three, heads, size-Linear"])
@pytest.mark.parametrize(
    ("form", "layer"),
    [
        ("slices", nn.Linear),
        ("three, heads, size", nn.Linear),
        ("three, heads, size", Conv1D),
        ("heads, three sizes", Conv1D),
    ],
)
def test_a_fused_layer_that_mixes_shards_is_refused(form, layer):
    """One remedy, separate layers, is exact above; the other, other names of its dims, leaves it whole."""
    with pytest.raises(cp.PlanError) as caught:
        train(form, layer, "tensor(2)")
    assert re.match(r"fused\.\.out (does not run on shard 0 of 2|.* do not add up)", str(caught.value))
    assert "as one fused layer for query, key and value does" in str(caught.value)
    assert "write separate layers, or keep this dim whole by giving it a name other than 'heads' in dims" in str(
        caught.value
    )
    dims = {"fused": ("attended", "model")}
    found, sharded = train(form, layer, "tensor(2)", dims=dims)
    assert max_difference(found, train(form, layer, "solo")[0]) <= 1e-12
    assert sharded == {"wide.weight", "wide.bias", "narrow.weight"}
