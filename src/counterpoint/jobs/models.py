"""Models of the built-in jobs: ordinary modules, without any reference to ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(*widths: int) -> nn.Sequential:
    """Return linear layers of these widths, with a ReLU between each two.

    Example:
        >>> mlp(8, 16, 4)(torch.zeros(3, 8)).shape
        torch.Size([3, 4])
    """
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in pairwise(widths):
        layers += [nn.Linear(num_inputs, num_outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class SmallCNN(nn.Sequential):
    """Two convolutions with BatchNorm, two linear layers; images ``(batch, 1, 8, 8)`` become ``(batch, num_classes)``.

    Args:
        width: channels of the first convolution; the second has twice as many.
        num_classes: outputs.
    """

    def __init__(self, width: int = 16, num_classes: int = 10) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 4 * width),
            nn.ReLU(),
            nn.Linear(4 * width, num_classes),
        )


class LinesNet(nn.Module):
    """Mean of feature embeddings followed by a linear layer, as in fastText.

    Inputs are int64 ``(batch, feature)``, padded with 0; outputs are ``(batch, num_classes)``. Most parameters are in
    one embedding table, of which a batch uses few rows.

    Args:
        num_classes: outputs.
        num_rows: rows of the table; row 0 is padding.
        width: embedding size.

    Source:
        Joulin et al., Bag of tricks for efficient text classification, EACL 2017.
    """

    def __init__(self, num_classes: int, num_rows: int = 2**20, width: int = 32) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(num_rows, width, mode="mean", padding_idx=0)
        self.head = nn.Linear(width, num_classes)
        with torch.no_grad():
            self.table.weight.uniform_(-1 / width, 1 / width)
            self.table.weight[0].zero_()

    def forward(self, features: Tensor) -> Tensor:
        """Return ``(batch, num_classes)``."""
        bags: Tensor = self.table(features)
        logits: Tensor = self.head(bags)
        return logits


@dataclass(frozen=True, slots=True)
class GPTShape:
    """Size of a `GPT`.

    Args:
        num_layers: transformer blocks.
        width: embedding size, a multiple of ``head_dim``.
        head_dim: features of an attention head.
        context: maximum sequence length.
        num_tokens: vocabulary size; 256 for byte-level tokens.
        dropout: probability on the embedding sum and on both residual branches.
    """

    num_layers: int = 4
    width: int = 192
    head_dim: int = 48
    context: int = 128
    num_tokens: int = 256
    dropout: float = 0.0


class CausalSelfAttention(nn.Module):
    """Causal self-attention on ``(batch, seq, width)``.

    The number of heads is derived from the layers' outputs, so that it also works when the columns of ``q``, ``k`` and
    ``v`` are split over ranks.
    """

    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width, bias=False)  # a bias would not change the attention weights
        self.v = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, seq, width)``."""
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, -1, self.head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(b, t, -1))
        return out


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them; the hidden layer is four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 4 * width)
        self.proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the shape of ``x``."""
        out: Tensor = self.proj(F.gelu(self.fc(x)))
        return out


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward with residual connections."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = CausalSelfAttention(shape.width, shape.head_dim)
        self.drop1 = nn.Dropout(shape.dropout)
        self.norm2 = nn.LayerNorm(shape.width)
        self.mlp = FeedForward(shape.width)
        self.drop2 = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the shape of ``x``."""
        x = x + self.drop1(self.attention(self.norm1(x)))
        out: Tensor = x + self.drop2(self.mlp(self.norm2(x)))
        return out


class GPT(nn.Module):
    """Byte-level language model; tokens ``(batch, seq)`` become logits ``(batch, seq, num_tokens)``.

    The output layer shares its weight with the token embedding.
    """

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.tok = nn.Embedding(shape.num_tokens, shape.width)
        self.pos = nn.Embedding(shape.context, shape.width)
        self.drop = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(TransformerBlock(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.num_tokens, bias=False)
        self.head.weight = self.tok.weight
        self.shape = shape
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize all parameters, those of norms excepted."""
        for name, parameter in self.named_parameters():
            _init_parameter(name, parameter, self.shape)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``(batch, seq, num_tokens)``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tok(tokens) + self.pos(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _init_parameter(name: str, parameter: nn.Parameter, shape: GPTShape) -> None:
    """Initialize matrices so that activations keep their scale; biases are zero, norms are unchanged."""
    if name.endswith("bias"):
        nn.init.zeros_(parameter)
    elif parameter.dim() == 2:
        std = 1 / math.sqrt(parameter.shape[1])
        residual = name.endswith("proj.weight")
        nn.init.normal_(parameter, std=std / math.sqrt(2 * shape.num_layers) if residual else std)
