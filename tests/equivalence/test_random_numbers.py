"""Whatever a model draws, it draws for a sample: number of microbatches, ranks and the plan change nothing."""

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import counterpoint as cp
from counterpoint.runtime.microbatches import slice_samples
from counterpoint.testing.parity import relative_difference
from tests.equivalence.transformer_models import SGD, TOKENS, build

DTYPE = torch.float64
PLANS = [
    ("solo", 4, ()), ("data(2)", None, ()), ("data(4)", None, ()), ("zero3(2)", None, ()), ("pipeline(2)", None, ()),
    ("pipeline(2) * data(2)", None, ()), ("server(2, consistency=bsp)", None, ()), ("solo", 2, ("recompute",)),
    ("pipeline(2, recompute=always)", 4, ()),
]  # fmt: skip


def name_row(row):
    plan, num_microbatches, passes = row
    return passes[0] if passes else plan if num_microbatches is None else f"{plan}, {num_microbatches}"


def gpt2():
    tokens = torch.randint(TOKENS, (8, 6), generator=torch.Generator().manual_seed(4))
    return (
        build("gpt2"),
        lambda output, targets: F.cross_entropy(output["logits"].mT, targets),
        {"input_ids": tokens},
        tokens,
    )


def cnn():
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(8, 1, 4, 4, generator=generator, dtype=DTYPE)
    layers = [
        nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Dropout2d(0.2), nn.Conv2d(4, 6, 3, padding=1), nn.Tanh(),
        nn.Dropout(0.1), nn.Flatten(), nn.Linear(96, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3),
    ]  # fmt: skip
    return nn.Sequential(*layers), F.cross_entropy, images, torch.randint(3, (8,), generator=generator)


def train(make, plan="solo", num_microbatches=1, passes=()):
    """Return the losses and the weights of three steps, the last one on a batch that no number of ranks divides."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, loss, inputs, targets = make()
    model = model.double()
    options = {"passes": passes} if passes else {}
    with cp.parallelize(model, SGD, loss, strategy=plan, num_microbatches=num_microbatches, **options) as step:
        losses = [
            step(slice_samples(inputs, 0, count), targets[:count])
            for count in (len(targets), len(targets), len(targets) - 1)
        ]
    return {"losses": torch.tensor(losses, dtype=DTYPE), **{n: p.detach().clone() for n, p in model.named_parameters()}}


@cache
def train_alone(make):
    return train(make)


def difference(make, *plan):
    """Return the largest difference to a single process with one microbatch."""
    alone, other = train_alone(make), train(make, *plan)
    return max(relative_difference(other[name], value) for name, value in alone.items())


@pytest.mark.long(quick=["recompute-cnn", "server(2, consistency=bsp)-cnn"])
@pytest.mark.parametrize("make", [gpt2, cnn])
@pytest.mark.parametrize("row", PLANS, ids=name_row)
def test_masks_depend_on_samples_only(make, row):
    assert difference(make, *row) <= 1e-12


class Noise(nn.Module):
    """A variational layer: noise from a function, and under no_grad."""

    def forward(self, x):
        with torch.no_grad():
            noise = torch.randn_like(x)
        return x + noise * torch.randn_like(x)


class DropPath(nn.Module):
    """Stochastic depth by sample."""

    def forward(self, x):
        return x * x.new_empty((len(x), *[1] * (x.dim() - 1))).bernoulli_(0.7) if self.training else x


class Coin(nn.Module):
    """One number for the whole batch."""

    def forward(self, x):
        return x * torch.rand(1, dtype=x.dtype)


class SequenceFirst(nn.Module):
    """Layers that have the samples along dim 1."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        output = self.layer(x.transpose(0, 1))
        return (output[0] if isinstance(output, tuple) else output).transpose(0, 1)


class Attention(nn.Module):
    """Attention with dropout of its weights; in torch's layer samples and heads are one dim."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        if kind not in {"causal", "masked"}:
            self.layer = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if self.kind == "causal":
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3, is_causal=True)
        if self.kind == "masked":
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask, dropout_p=0.3)
        return self.layer(x, x, x, need_weights=self.kind == "with weights", attn_mask=~mask)[0]


class Tokens(nn.Module):
    """Dropout on the tokens of all samples as one dim."""

    def forward(self, x):
        return F.dropout(x.flatten(0, 1), 0.3).view_as(x)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "noise": Noise, "drop path": DropPath, "one number": Coin, "tokens": Tokens, "rrelu": nn.RReLU,
    "alpha dropout": lambda: nn.AlphaDropout(0.2), "feature alpha dropout": lambda: nn.FeatureAlphaDropout(0.2),
    "dropout1d": lambda: nn.Dropout1d(0.3),
    "sequence-first transformer": lambda: SequenceFirst(nn.TransformerEncoderLayer(8, 2, 8, dropout=0.2)),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 8, dropout=0.2, batch_first=True),
    "lstm": lambda: SequenceFirst(nn.LSTM(8, 4, 3, dropout=0.4, bidirectional=True)),
    "gru": lambda: SequenceFirst(nn.GRU(8, 8, 2, dropout=0.4)),
    **{f"attention, {kind}": partial(Attention, kind) for kind in ("causal", "masked", "with weights", "plain")},
}  # fmt: skip


@pytest.mark.long(quick=["feature alpha dropout"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_that_draws_does_so_by_sample(name):
    def make():
        # four samples of four entries: no shape tells which dim has the samples
        inputs = torch.randn(4, 4, 6, dtype=DTYPE)
        return nn.Sequential(nn.Linear(6, 8), LAYERS[name](), nn.Linear(8, 2)), F.mse_loss, inputs, torch.zeros(4, 4, 2)

    for plan, num_microbatches in (("solo", 4), ("pipeline(2)", 2)):
        assert difference(make, plan, num_microbatches) <= 1e-12


class SkippedTwice(nn.Module):
    """Not an nn.Sequential, so that a pipeline traces it: functions are operators there."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.lstm, self.attention = nn.LSTM(8, 8, 2, dropout=0.4, batch_first=True), Attention("with weights")
        self.noise, self.last = Noise(), nn.Linear(8, 2)

    def forward(self, x):
        x = self.first(x)
        x = x + F.dropout(self.lstm(self.second(x))[0], 0.2, self.training)
        x = x + F.gumbel_softmax(self.noise(x)) * torch.rand((len(x), 1, 1), dtype=x.dtype)
        return self.last(self.attention(x))


@pytest.mark.long(quick=["data(2)"])
@pytest.mark.parametrize("plan", ["data(2)", "pipeline(2)", "zero3(2)"])
def test_a_traced_model_draws_as_one_that_runs_eagerly(plan):
    def make():
        return SkippedTwice(), F.mse_loss, torch.randn(4, 4, 6, dtype=DTYPE), torch.zeros(4, 4, 2)

    assert difference(make, plan, None) <= 1e-12


class Pair(nn.Module):
    """Two linear layers that may be sharded, then dropout of their sum."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop, self.last = nn.Linear(6, 8), nn.Linear(8, 6), nn.Dropout(0.3), nn.Linear(6, 2)

    def forward(self, x):
        return self.last(x + self.drop(self.down(torch.tanh(self.up(x)))))


@pytest.mark.long(quick=["tensor(2) * data(2)"])
@pytest.mark.parametrize("plan", ["tensor(2)", "tensor(2) * data(2)"])
def test_ranks_that_share_a_layer_draw_the_same(plan):
    def make():
        return Pair(), F.mse_loss, torch.randn(4, 6, dtype=DTYPE), torch.zeros(4, 2)

    assert difference(make, plan, None) <= 1e-12


class Recomputing(nn.Module):
    """Torch's own checkpoint around layers that draw."""

    def __init__(self, *, recomputes):
        super().__init__()
        self.recomputes = recomputes
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 6), nn.Dropout(0.5))
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        return self.last(checkpoint(self.inner, x, use_reentrant=False) if self.recomputes else self.inner(x))


def test_torchs_checkpoint_recomputes_with_the_masks_of_its_forward():
    def make(recomputes):
        return Recomputing(recomputes=recomputes), F.mse_loss, torch.randn(4, 6, dtype=DTYPE), torch.zeros(4, 2)

    alone = train(lambda: make(False))
    for plan, num_microbatches in (("solo", 1), ("solo", 2), ("data(2)", None)):
        other = train(lambda: make(True), plan, num_microbatches)
        assert max(relative_difference(other[name], value) for name, value in alone.items()) <= 1e-12


class RecomputingFunctions(Recomputing):
    """Torch's own checkpoint around functions that draw, of the module itself."""

    def compute(self, x):
        hidden = F.dropout(torch.tanh(self.inner[0](x)), 0.5, self.training)
        return F.dropout(torch.tanh(self.inner[2](hidden)), 0.5, self.training)

    def forward(self, x):
        return self.last(checkpoint(self.compute, x, use_reentrant=False) if self.recomputes else self.compute(x))


def noisy_error(output, targets):
    return F.mse_loss(output * (1 + torch.rand_like(output)), targets * torch.rand_like(targets))


def recomputed_error(output, targets):
    return checkpoint(noisy_error, output, targets, use_reentrant=False)


@pytest.mark.long(quick=["solo-1", "data(2)-None"])
@pytest.mark.parametrize(
    ("plan", "num_microbatches"), [("solo", 1), ("solo", 2), ("data(2)", None), ("zero3(2)", None)]
)
def test_torchs_checkpoint_recomputes_functions_and_losses_with_their_masks(plan, num_microbatches):
    """The first draw of a recomputation was taken for one of the loss, so that gradients had other masks."""

    def make(recomputes):
        loss = recomputed_error if recomputes else noisy_error
        return (
            RecomputingFunctions(recomputes=recomputes),
            loss,
            torch.randn(4, 6, dtype=DTYPE),
            torch.ones(4, 2, dtype=DTYPE),
        )

    alone = train(lambda: make(False))
    other = train(lambda: make(True), plan, num_microbatches)
    assert max(relative_difference(other[name], value) for name, value in alone.items()) <= 1e-12


def denoise(output, targets):
    """A diffusion model's loss: a level and noise for each sample."""
    level = torch.randint(1, 10, (len(targets),)) / 10
    return F.mse_loss(output, targets + level[:, None] * torch.randn_like(targets))


@pytest.mark.parametrize(("plan", "num_microbatches"), [("solo", 4), ("data(2)", None), ("pipeline(2)", 2)])
def test_a_loss_draws_by_sample(plan, num_microbatches):
    def make():
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        return model, denoise, torch.randn(4, 6, dtype=DTYPE), torch.zeros(4, 6, dtype=DTYPE)

    assert difference(make, plan, num_microbatches) <= 1e-12


class Multinomial(nn.Module):
    """It draws by a function that is not known to draw by sample."""

    def forward(self, x):
        return x * (1 + torch.multinomial(torch.ones_like(x), x.shape[-1]))


class OwnGenerator(nn.Module):
    """It draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(2)

    def forward(self, x):
        return x * torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


class TokenMajor(nn.Module):
    """Dropout on tokens of all samples as one dim, those of one position next to each other."""

    def forward(self, x):
        x = x[:, None].expand(-1, 3, -1).transpose(0, 1)
        x = x + torch.arange(3.0)[:, None, None]
        return F.dropout(x.flatten(0, 1), 0.3, self.training).view_as(x).mean(0)


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (Multinomial, r"module '1' \(Multinomial\) come from torch's multinomial"),
        (OwnGenerator, r"module '1' \(OwnGenerator\) come from torch's rand"),
        (TokenMajor, r"module '1' \(TokenMajor\) come from a draw of the shape \(12, 8\) for 4 samples"),
    ],
)
def test_a_module_whose_numbers_cannot_be_keyed_is_named(layer, what):
    def make():
        model = nn.Sequential(nn.Linear(6, 8), layer(), nn.Linear(8, 2))
        return model, F.mse_loss, torch.randn(4, 6, dtype=DTYPE), torch.zeros(4, 2)

    train(make)  # with one microbatch, there is nothing to say
    with pytest.warns(UserWarning, match=rf"^the random numbers of {what}, which are not keyed by sample, so data\(2"):
        train(make, "data(2)", None)


def test_evaluation_draws_nothing():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    trainer = cp.Trainer(model, loss=F.mse_loss, optimizer=SGD, strategy="data(2)")
    data = torch.utils.data.TensorDataset(torch.randn(4, 6), torch.zeros(4, 2))
    first, second = (trainer.evaluate(data, batch_size=size) for size in (4, 2))
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-6)
