"""Models of transformers train in stages as they do alone: built from a config, not edited, dropout on.

Tied embeddings (GPT-2, BERT, T5), rotary positions and key-value heads (Llama), masks, an encoder with a decoder,
images. One test for each model, so that the tracing and the import are paid for by few workers.
"""

import pytest

import counterpoint as cp
from counterpoint.partitioning.partition import partition_model
from counterpoint.testing.parity import TOLERANCE, relative_difference
from tests.equivalence import transformer_models
from tests.references import async_pipeline

PLANS = ["pipeline(2)", "pipeline(4)", "pipeline(2) * data(2)"]
ORDERS = {
    "gpt2": ["interleaved(2)"],
    "llama": ["zero_bubble(2)"],
    "bert": ["gpipe(3)"],
    "t5": ["pipeline(2, replicas=(1,2))"],
    "vit": ["pipeline(2) * zero(2, level=2)"],
}


@pytest.mark.long
@pytest.mark.timeout(180)  # five plans of each, traced one by one
@pytest.mark.parametrize("name", transformer_models.KINDS)
def test_a_model_of_transformers_trains_in_stages_as_it_does_alone(name):
    result = {strategy: transformer_models.max_error(name, strategy) for strategy in PLANS + ORDERS[name]}
    assert not {strategy: off for strategy, off in result.items() if not off <= TOLERANCE}


@pytest.mark.long(quick=["llama-{}.post_attention_layernorm"])
@pytest.mark.parametrize(
    ("name", "layer"), [("gpt2", "transformer.h.{}.ln_2"), ("llama", "{}.post_attention_layernorm")]
)
def test_a_stage_may_begin_after_the_attention_of_every_layer(name, layer):
    spec = partition_model(
        transformer_models.build(name), transformer_models.batches(name)[0][0], granularity="blocks"
    ).spec
    places = [piece.modules_started[0] for piece in spec.layers if piece.can_start_stage]
    layers = {"gpt2": range(3), "llama": ["model.layers.0", "model.layers.1"]}[name]
    assert set(map(layer.format, layers)) <= set(places)


@pytest.mark.long
def test_gpt_2_without_ties_trains_in_a_stream_by_the_rule_of_the_stream():
    mine, theirs = (transformer_models.build("gpt2", **transformer_models.KINDS["gpt2"].quiet) for _ in range(2))
    batches = [(inputs["input_ids"], targets) for inputs, targets in transformer_models.batches("gpt2")]
    with cp.parallelize(mine, transformer_models.SGD, transformer_models.loss, strategy="pipedream(2)") as step:
        losses = [step(*batch) for batch in batches] + step.flush()
        stages = transformer_models.count_stages(step, theirs)
    updates = [(params, transformer_models.SGD(params.values())) for params in stages]
    rule = {"read": async_pipeline.stashing((1, 1)), "interval": lambda _: 1}
    params, expected = async_pipeline.async_pipeline(
        theirs, updates=updates, batches=batches, loss=transformer_models.loss, **rule
    )
    assert [loss for loss in losses if loss == loss] == pytest.approx(expected, rel=TOLERANCE)
    assert (
        max(relative_difference(param.detach(), params[name]) for name, param in mine.named_parameters()) <= TOLERANCE
    )


def test_a_stream_of_a_model_with_tied_weights_is_refused_by_name():
    with (
        pytest.raises(cp.PlanError, match=r"^blocks 0 and 4 share weights, but under .*; untie them, "),
        cp.parallelize(
            transformer_models.build("gpt2"), transformer_models.SGD, transformer_models.loss, strategy="pipedream(2)"
        ) as step,
    ):
        step(*transformer_models.batches("gpt2")[0])
