"""Models as users write them, each with one thing that makes partitioning hard."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Causal attention whose number of heads is left to what its layers give."""

    def __init__(self, width, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, -1, self.head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc, self.proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x)))


class Block(nn.Module):
    def __init__(self, width, head_dim, dropout):
        super().__init__()
        self.norm1, self.attention, self.drop1 = nn.LayerNorm(width), Attention(width, head_dim), nn.Dropout(dropout)
        self.norm2, self.mlp, self.drop2 = nn.LayerNorm(width), FeedForward(width), nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.drop1(self.attention(self.norm1(x)))
        return x + self.drop2(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Tied embeddings, a list of blocks, dropout."""

    def __init__(self, num_layers, width, head_dim, dropout):
        super().__init__()
        self.tok, self.pos, self.drop = nn.Embedding(11, width), nn.Embedding(8, width), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, head_dim, dropout) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 11, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, tokens):
        x = self.drop(self.tok(tokens) + self.pos(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(num_layers=2, dropout=0.2):
    return GPT(num_layers, 16, 4, dropout), (torch.randint(0, 11, (4, 8)),)


def perceptron():
    layers = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    return nn.Sequential(*layers), (torch.randn(6, 8),)


def cnn():
    """Convolutions with BatchNorm, which changes its buffers."""
    first = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()
    second = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*first, *second, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)), (torch.randn(6, 1, 8, 8),)


class LongSkip(nn.Module):
    """Two inputs, one used at the very end; a nested output; ReLU in place; a table that is a bare parameter."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.table = nn.Parameter(torch.randn(6))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x, late):
        first = self.layers[0](x) * self.table
        z = first
        for layer in self.layers[1:]:
            z = self.relu(layer(z))
        return {"z": z + first + x, "late": late * self.table, "nothing": None, "three": 3}


def long_skip():
    return LongSkip(), (torch.randn(4, 6), torch.randn(4, 6))


class Recurrent(nn.Module):
    """Whole numbers in, an LSTM with dropout between its layers."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.lstm = nn.LSTM(6, 5, 2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens):
        return self.head(self.lstm(self.table(tokens))[0])


def recurrent():
    return Recurrent(), (torch.randint(0, 9, (4, 6)),)


class DrawsInForward(nn.Module):
    """Dropout as a function in the outermost forward: no module of its own, and one layer called twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.drop = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x):
        for layer in self.layers:
            x = self.drop(x) + F.dropout(layer(x), 0.3, self.training)
        return self.norm(F.dropout(x, 0.3, self.training))


def draws_in_forward():
    return DrawsInForward(), (torch.randn(4, 5),)


class ChangesInPlace(nn.Module):
    """Each block begins by changing what it is given, while a view of it is used again later."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = self.layers[0](x)
        halves = x.view(-1, 2, 2)
        x = self.layers[1](x.mul_(2.0))
        x = x + 1
        x = self.layers[2](F.relu_(x))
        return x + halves.flatten(1)


def changes_in_place():
    return ChangesInPlace(), (torch.randn(4, 4),)


class FusedAttention(nn.Module):
    """One layer for query, key and value together: its features cannot be sharded in contiguous parts."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, 2, 4).transpose(1, 2) for part in self.qkv(self.norm(x)).split(8, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).reshape(b, t, c))


class FixedHeads(nn.Module):
    """The number of heads is written out; the norm's output is also used next to the layers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        b, t, c = x.shape
        h = self.norm(x)
        q, k, v = (layer(h).view(b, t, 4, c // 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-2, -1) / 2).softmax(-1)
        return h + self.out((weights @ v).transpose(1, 2).contiguous().view(b, t, c))


class TransposedLinear(nn.Module):
    """A linear layer on flattened inputs, with a weight of ``(in, out)``, as the Conv1D of GPT-2."""

    def __init__(self, num_inputs, num_outputs):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(num_inputs, num_outputs)),
            nn.Parameter(torch.ones(num_outputs)),
        )

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class TransposedBlock(nn.Module):
    """Attention with one layer for query, key and value, and a feed-forward network, all with transposed weights."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), TransposedLinear(8, 24), TransposedLinear(8, 8)
        self.up, self.down = TransposedLinear(8, 16), TransposedLinear(16, 8)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, 2, 4).transpose(1, 2) for part in self.qkv(self.norm(x)).split(8, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))
        return x + self.down(torch.tanh(self.up(x)) ** 2)


def transposed():
    return TransposedBlock(), (torch.randn(3, 5, 8),)


def fixed_heads():
    return FixedHeads(), (torch.randn(3, 5, 8),)


class Residual(nn.Module):
    """Blocks of two layers, added to their input: a cut between the layers falls into a pair."""

    def __init__(self):
        super().__init__()
        pairs = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.first, self.blocks, self.last = nn.Linear(8, 16), nn.ModuleList(pairs), nn.Linear(16, 4)

    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        return self.last(h)


def residual():
    return Residual(), (torch.randn(6, 8),)


ALL = {
    make.__name__: make
    for make in (
        perceptron, cnn, gpt, long_skip, recurrent, draws_in_forward, changes_in_place, fixed_heads,
        residual
    )
}  # fmt: skip
