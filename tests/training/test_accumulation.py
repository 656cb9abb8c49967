"""Gradients of several batches that are accumulated for one update."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.errors import DataError
from tests.training.trainers import STRATEGIES, build_seeded, dataset, make_generator, max_difference, mlp

ADAM = partial(optim.Adam, lr=1e-2)
UPDATES = ((12, 6, 9, 5), (12, 12, 8, 4), (7, 4))
"""Samples of the batches of each update."""


def batches_of(lengths):
    inputs, targets = dataset().tensors
    return list(zip(inputs[: sum(lengths)].split(lengths), targets[: sum(lengths)].split(lengths), strict=True))


def train_by_hand(model):
    """Plain steps on the samples of all batches of an update at once."""
    optimizer, losses = ADAM(model.parameters()), []
    for lengths in UPDATES:
        inputs, targets = (torch.cat(values) for values in zip(*batches_of(lengths), strict=True))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_accumulated(model, **options):
    losses = []
    with cp.parallelize(model, ADAM, F.cross_entropy, **options) as step:
        for lengths in UPDATES:
            for batch in batches_of(lengths):
                step.accumulate(*batch)
            losses.append(step.update())
    return losses


@pytest.mark.long(quick=["pipeline(2, schedule=gpipe) * data(2)", "server(2)", "zero(2, level=2)"])
@pytest.mark.parametrize("strategy", ["solo", *STRATEGIES, "data(4)", "pipeline(2, schedule=gpipe) * data(2)"])
def test_accumulated_batches_train_as_one_batch_of_all_their_samples(strategy):
    expected, model = mlp(), mlp()
    losses = train_by_hand(expected)
    assert train_accumulated(model, strategy=strategy) == pytest.approx(losses, abs=1e-12)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=1e-12)


class TokenModel(nn.Module):
    """Logits of every token; of the padding, too."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 8), nn.Linear(8, 5)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens))).transpose(1, 2)


@pytest.mark.long(quick=["data(2)", "solo"])
@pytest.mark.parametrize("strategy", ["solo", "data(2)", "zero3(2)"])
def test_accumulated_batches_of_other_lengths_give_every_token_the_same_weight(strategy):
    random = make_generator()
    texts = [torch.randint(5, (6, length), generator=random) for length in (4, 9, 3)]
    labels = [text.where(torch.rand(text.shape, generator=random) < 0.6, -100) for text in texts]
    expected, model = build_seeded(TokenModel), build_seeded(TokenModel)
    sums = [F.cross_entropy(expected(text), label, reduction="sum") for text, label in zip(texts, labels, strict=True)]
    loss = torch.stack(sums).sum() / sum(int((label != -100).sum()) for label in labels)
    optimizer = ADAM(expected.parameters())
    loss.backward()
    optimizer.step()
    with cp.parallelize(model, ADAM, F.cross_entropy, strategy=strategy) as step:
        for text, label in zip(texts, labels, strict=True):
            step.accumulate(text, label)
        assert step.update() == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=1e-12)


def test_dropout_of_accumulated_batches_is_that_of_one_batch():
    lengths, models = (8, 4), [build_seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
                               for _ in range(2)]  # fmt: skip
    batches = batches_of(lengths)
    with cp.parallelize(models[0], ADAM, F.cross_entropy, strategy="solo") as step:
        step(*(torch.cat(values) for values in zip(*batches, strict=True)))
    with cp.parallelize(models[1], ADAM, F.cross_entropy, strategy="data(2)") as step:
        for batch in batches:
            step.accumulate(*batch)
        step.update()
    assert max_difference(*(model.state_dict() for model in models)) <= 1e-12


def test_an_update_without_a_batch_is_refused():
    with (
        cp.parallelize(mlp(), ADAM, F.cross_entropy, strategy="solo") as step,
        pytest.raises(DataError, match=r"update\(\) has no batch to train on; call accumulate\(batch\)"),
    ):
        step.update()


def test_batches_that_are_accumulated_and_dropped_cause_a_warning():
    step = cp.parallelize(mlp(), ADAM, F.cross_entropy, strategy="solo")
    step.accumulate(*batches_of((12,))[0])
    with pytest.warns(UserWarning, match="1 accumulated batch was not trained on"):
        step.close()


def test_a_call_between_accumulate_and_update_is_refused():
    (batch,) = batches_of((12,))
    with cp.parallelize(mlp(), ADAM, F.cross_entropy, strategy="solo") as step:
        step.accumulate(*batch)
        with pytest.raises(DataError, match=r"while 1 are accumulated; give this one to accumulate\(batch\), too"):
            step(*batch)
        step.update()


def test_more_batches_than_microbatches_are_refused_with_their_numbers():
    batches = batches_of((6, 6, 6))
    with cp.parallelize(mlp(), ADAM, F.cross_entropy, strategy="data(2)", num_microbatches=1) as step:
        for batch in batches:
            step.accumulate(*batch)
        with pytest.raises(DataError, match=r"3 batches were accumulated, but a step under .* has 2 microbatches"):
            step.update()


@pytest.mark.parametrize("name", ["forward", "backward", "zero_grad"])
def test_the_parts_of_a_step_are_refused_with_what_to_write_instead(name):
    with cp.parallelize(mlp(), ADAM, F.cross_entropy, strategy="solo") as step:
        with pytest.raises(AttributeError, match=r"accumulate gradients over batches with step.accumulate\(batch\)"):
            getattr(step, name)
        step(*batches_of((12,))[0])
