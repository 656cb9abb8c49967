"""Bytes that ranks hold and send in mixed precision: predicted from the program, and counted while ranks run."""

from functools import partial

import pytest
import torch
from torch import nn, optim

from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.training.plan_resolution import trace_model_spec
from tests.runtime.local_ranks import build_local_ranks


class Small(nn.Module):
    """An embedding whose rows are cast, a norm in float32, a head that is tied to the embedding, and a layer."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.layer = nn.Embedding(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.norm(self.layer(self.table(tokens))))


def describe(model, inputs, precision):
    optimizer_spec = OptimizerSpec(partial(optim.AdamW, lr=1e-2), dict(model.named_parameters()))
    return trace_model_spec(model, optimizer_spec, inputs, None, precision)
