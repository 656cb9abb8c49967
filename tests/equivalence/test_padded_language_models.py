"""GPT-2 of transformers on padded batches: every plan trains on the mean over the tokens of the batch, as plain torch."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F

import counterpoint as cp
from counterpoint.testing.parity import relative_difference
from tests.equivalence.transformer_models import SGD, TOKENS, build

SAMPLES, LENGTH = 8, 8
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
PLANS = [
    ("solo", 4), ("data(2)", None), ("data(4)", None), ("zero3(2)", None), ("pipeline(2)", 4),
    ("pipeline(2) * data(2)", 2), ("server(2, consistency=bsp)", None),
]  # fmt: skip


def batches():
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        lengths = torch.randint(2, LENGTH + 1, (SAMPLES,), generator=generator)
        tokens = torch.randint(TOKENS, (SAMPLES, LENGTH), generator=generator)
        mask = torch.arange(LENGTH) < lengths[:, None]
        yield {"input_ids": tokens, "attention_mask": mask.long()}, tokens.where(mask, -100)


def causal_loss(output, labels):
    """The mean over the tokens that follow another, as the model's own, but in float64."""
    return F.cross_entropy(output["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def own_loss(output, labels):
    return output["loss"]


@cache
def plain(loss):
    model = build("gpt2", **NO_DROPOUT)
    optimizer = SGD(model.parameters())
    losses = []
    for inputs, labels in batches():
        optimizer.zero_grad()
        value = loss(model(**inputs, labels=labels), labels)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize(("plan", "num_microbatches"), PLANS, ids=str)
def test_the_loss_of_a_padded_batch_is_the_mean_over_its_tokens(plan, num_microbatches):
    expected_losses, expected = plain(causal_loss)
    model = build("gpt2", **NO_DROPOUT)
    with cp.parallelize(model, SGD, causal_loss, strategy=plan, num_microbatches=num_microbatches) as step:
        losses = [step(inputs, labels) for inputs, labels in batches()]
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    differences = {
        name: relative_difference(param.detach(), expected[name]) for name, param in model.named_parameters()
    }
    assert max(differences.values()) < 1e-12


@pytest.mark.parametrize(
    ("plan", "num_microbatches"), [(plan, micros) for plan, micros in PLANS if "pipeline" not in plan and "zero3" not in plan],
    ids=str,
)  # fmt: skip
def test_the_loss_that_the_model_computes_is_the_mean_over_all_tokens(plan, num_microbatches):
    """Transformers computes it in float32."""
    expected_losses, expected = plain(own_loss)
    model = build("gpt2", **NO_DROPOUT)
    with cp.parallelize(model, SGD, own_loss, strategy=plan, num_microbatches=num_microbatches) as step:
        losses = [step({**inputs, "labels": labels}, labels) for inputs, labels in batches()]
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    differences = {
        name: relative_difference(param.detach(), expected[name]) for name, param in model.named_parameters()
    }
    assert max(differences.values()) < 1e-5
