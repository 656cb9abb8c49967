"""Values that skip stages go straight to those that read them, and training stays what it is."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from counterpoint.program.text import format_program
from counterpoint.testing import parity
from counterpoint.testing.parity_models import TrainConfig
from tests.equivalence import async_pipeline_cases
from tests.equivalence.skip_models import alone, difference, trained

ORDERS = [
    "pipeline(2, schedule=gpipe)",
    "pipeline(4, schedule=gpipe)",
    "pipeline(2)",
    "pipeline(3)",
    "pipeline(4)",
    "pipeline(2, schedule=gpipe, chunks_per_stage=2)",
    "pipeline(2, schedule=interleaved, chunks_per_stage=4)",
    "pipeline(3, schedule=interleaved, chunks_per_stage=2)",
    "pipeline(4, schedule=interleaved, chunks_per_stage=2)",
    "pipeline(3, schedule=zero_bubble)",
    "pipeline(4, schedule=zero_bubble, chunks_per_stage=2)",
]
AROUND = [
    "pipeline(3, replicas=(1,2,1))",
    "pipeline(2, replicas=(2,1))",
    "pipeline(3) * data(2)",
    "pipeline(4) * zero(2, level=1)",
    "pipeline(2, schedule=zero_bubble) * zero(2, level=2)",
    "pipeline(2, schedule=interleaved, chunks_per_stage=2) * data(2) + overlap",
    "pipeline(2) * server(2)",
    "tensor(2) * pipeline(2)",
    "tensor(2) * pipeline(4, schedule=zero_bubble)",
    "tensor(2) * data(2)",
    "zero(2, level=3)",
]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ORDERS)
def test_every_order_trains_a_model_with_skips_the_same(strategy):
    assert difference(trained(strategy)) <= parity.TOLERANCE


@pytest.mark.long(quick=["pipeline(2, replicas=(2,1))"])
@pytest.mark.parametrize("strategy", AROUND)
def test_skips_train_the_same_with_what_may_stand_around_and_inside(strategy):
    assert difference(trained(strategy)) <= parity.TOLERANCE


def test_clipping_by_the_norm_over_all_stages_trains_the_same():
    clipped = TrainConfig(clip_norm=0.1)
    assert difference(trained("pipeline(4)", clipped), clipped) <= parity.TOLERANCE
    assert (
        parity.relative_difference(alone().params["layers.1.up.weight"], alone(clipped).params["layers.1.up.weight"])
        > 1e-3
    )


def test_inputs_that_are_read_late_and_values_without_a_gradient_are_not_sent():
    run = trained("pipeline(4)")
    text = format_program(run.compiled.program)
    assert run.compiled.model.input_blocks == {0, 7}
    assert "s0+3-6.0>3" in text
    assert "ds0+3-6" not in text


class Skipping(nn.Sequential):
    """Layers of which each also reads what the one three before it has made, and the last one the first one's."""

    def forward(self, x):
        made: list[torch.Tensor] = []
        for layer in self:
            x = layer(x) + (0.5 * made[-3] if len(made) > 2 else 0.0)
            made.append(x)
        return x + made[0]


@dataclass(frozen=True)
class SkippingCase(async_pipeline_cases.Case):
    def build(self):
        return Skipping(*async_pipeline_cases.network(2 * len(self.replicas)))


STREAMS = [
    SkippingCase("stashing", (1, 1, 1), (4,) * 6),
    SkippingCase("stashing", (1, 1, 1, 1), (4,) * 8, flushes=(5,)),
    SkippingCase("vertical_sync", (1, 1, 1, 1), (4,) * 8),
    SkippingCase("stashing", (2, 1, 1), (4, 4, 3, 4, 4, 4)),
    SkippingCase("stashing", (1, 2, 1), (4, 4, 3, 4, 4, 4)),
    SkippingCase("double_buffer", (1, 1, 1, 1), (8,) * 6),
    SkippingCase("double_buffer", (2, 1, 2), (12, 12, 11, 12), per_body=6),
]


@pytest.mark.long(quick=["stashing(1, 2, 1)"])
@pytest.mark.parametrize("case", STREAMS, ids=lambda case: f"{case.rule}{case.replicas}")
def test_streams_train_models_with_skips_by_their_rules(case):
    assert async_pipeline_cases.max_error(case) <= parity.TOLERANCE
