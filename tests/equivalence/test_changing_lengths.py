"""Batches of other lengths and sizes in every step: every plan trains as plain torch does, and traces a few times."""

import copy
import gc
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from counterpoint.partitioning.tracing.traced import TracedPartition
from counterpoint.testing.parity import relative_difference
from tests.equivalence.transformer_models import SGD, TOKENS, build

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SIZES = [(8, 5), (8, 8), (8, 6), (6, 3), (5, 7), (8, 1), (8, 2)]
PLANS = [
    ("solo", 4, None), ("data(2)", None, None), ("zero3(2)", None, None), ("pipeline(2)", 4, None),
    ("gpipe(2)", 4, None), ("pipeline(2, schedule=zero_bubble)", 4, None), ("interleaved(2)", 4, None),
    ("pipeline(2) * data(2)", 2, None), ("pipeline(3)", 4, None), ("gpipe(2, checkpoint=always)", 4, None),
    ("zero3(2)", None, ("recompute",)), ("pipeline(2)", 4, ("recompute",)), ("tensor(2)", 2, None),
    ("pipeline(2) * tensor(2)", 4, None),
]  # fmt: skip


def batches(sizes=SIZES):
    generator = torch.Generator().manual_seed(7)
    for samples, length in sizes:
        lengths = torch.randint(1, length + 1, (samples,), generator=generator)
        tokens = torch.randint(TOKENS, (samples, length), generator=generator)
        mask = torch.arange(length) < lengths[:, None]
        yield {"input_ids": tokens, "attention_mask": mask.long()}, tokens.where(mask, -100)


def token_loss(output, labels):
    logits = output if isinstance(output, torch.Tensor) else output["logits"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Attention(nn.Module):
    """A language model with a layer for each projection, which tensor parallelism can shard."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(TOKENS, 8), nn.Linear(8, TOKENS)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, input_ids, attention_mask):
        hidden = self.table(input_ids)
        samples, length, _ = hidden.shape
        q, k, v = (layer(hidden).view(samples, length, 4, 2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mask = attention_mask[:, None, None, :].bool()
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(samples, length, 8))
        return self.head(hidden + self.down(torch.relu(self.up(hidden))))


class Recurrent(nn.Module):
    """A language model whose recurrent layer a trace fixes to one length."""

    def __init__(self):
        super().__init__()
        self.table, self.lstm, self.head = (
            nn.Embedding(TOKENS, 8),
            nn.LSTM(8, 8, batch_first=True),
            nn.Linear(8, TOKENS),
        )

    def forward(self, input_ids, attention_mask):
        return self.head(self.lstm(self.table(input_ids))[0]) + attention_mask[..., None]


@cache
def initial(kind):
    torch.manual_seed(3)
    return (build("gpt2", **NO_DROPOUT, n_layer=2) if kind == "gpt2" else kind()).double()


@cache
def plain(kind, num_steps):
    model = copy.deepcopy(initial(kind))
    optimizer = SGD(model.parameters())
    losses = []
    for inputs, labels in batches(SIZES[:num_steps]):
        optimizer.zero_grad()
        value = token_loss(model(**inputs), labels)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def check(kind, plan, num_microbatches, passes=None, num_steps=7):
    """Check that training gives what plain torch gives."""
    expected_losses, expected = plain(kind, num_steps)
    model = copy.deepcopy(initial(kind))
    step = cp.parallelize(model, SGD, token_loss, strategy=plan, num_microbatches=num_microbatches, passes=passes)
    with step:
        losses = [step(inputs, labels) for inputs, labels in batches(SIZES[:num_steps])]
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    differences = {
        name: relative_difference(param.detach(), expected[name]) for name, param in model.named_parameters()
    }
    assert max(differences.values()) < 1e-12


@pytest.mark.long
def test_a_pipeline_traces_nothing_after_the_tenth_length():
    model, counts = copy.deepcopy(initial(Attention)), []
    partitions: list[TracedPartition] = []
    with cp.parallelize(model, SGD, token_loss, strategy="pipeline(2)", num_microbatches=4) as step:
        for batch in batches([(8, 2 + (7 * at) % 20) for at in range(20)]):
            step(*batch)
            partitions = partitions or [one for one in gc.get_objects() if type(one) is TracedPartition]
            counts.append(sum(one.num_traces for one in partitions))
    assert 0 < counts[0] < counts[-1]
    assert counts[9:] == counts[9:10] * 11


@pytest.mark.long(quick=["data(2)-None-None"])
@pytest.mark.parametrize(("plan", "num_microbatches", "passes"), PLANS, ids=str)
def test_padded_batches_of_changing_sizes_train_exactly(plan, num_microbatches, passes):
    check(Attention, plan, num_microbatches, passes)


@pytest.mark.long(quick=["tensor(2) * pipeline(2)"])
@pytest.mark.parametrize("plan", ["zero3(2)", "pipeline(2)", "tensor(2)", "tensor(2) * pipeline(2)"])
def test_gpt2_trains_exactly_on_padded_batches_of_changing_sizes(plan):
    """Its layers have transposed weights, and one layer computes query, key and value."""
    check("gpt2", plan, 2, num_steps=4)


@pytest.mark.long
@pytest.mark.parametrize("plan", ["zero3(2)", "pipeline(2)"])
def test_a_recurrent_model_trains_exactly_on_changing_sizes(plan):
    check(Recurrent, plan, 2)


class Chain(nn.Module):
    """Runs a Sequential by a forward of its own, so that it is traced."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, input_ids):
        return self.layers(input_ids)


@pytest.mark.long(quick=["pipedream_2bw(2)"])
@pytest.mark.parametrize("plan", ["pipedream(2)", "pipedream_2bw(2)"])
def test_an_asynchronous_pipeline_gives_on_a_trace_what_it_gives_on_a_sequential(plan):
    torch.manual_seed(3)
    kinds = (nn.Embedding(TOKENS, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, TOKENS))
    layers, losses = nn.Sequential(*kinds).double(), []
    for model in (copy.deepcopy(layers), Chain(copy.deepcopy(layers))):
        with cp.parallelize(model, SGD, token_loss, strategy=plan, num_microbatches=2) as step:
            losses.append([step(inputs["input_ids"], labels) for inputs, labels in batches()] + step.flush())
    assert losses[0][1:] == pytest.approx(losses[1][1:], rel=1e-12)
