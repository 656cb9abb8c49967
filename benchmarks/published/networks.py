"""Networks with published layers: parameters, multiplications and outputs per layer and sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from counterpoint.model.spec import Block, LayerSpec, ModelSpec, Param

FLOAT = 4  # bytes


@dataclass(frozen=True, slots=True)
class NetworkLayer:
    """One layer, for one sample.

    Args:
        name: of its block; adjacent layers with one name form a block.
        num_params: its parameters.
        macs: multiply-accumulate operations of a forward.
        outputs: elements that it writes.
        inputs: elements that it reads, without parameters.
    """

    name: str
    num_params: int
    macs: int
    outputs: int
    inputs: int = 0


def conv(name: str, inner: int, outer: int, area: int, kernel: int = 3, before: int = 0) -> NetworkLayer:
    """Return a convolution without bias: it writes ``outer`` channels of ``area`` elements, reads ``before`` each."""
    params = inner * outer * kernel
    return NetworkLayer(name, params, params * area, outer * area, inner * (before or area))


def norm(name: str, channels: int, area: int) -> NetworkLayer:
    """Return a batch norm."""
    return NetworkLayer(name, 2 * channels, 0, channels * area, channels * area)


def parameterless(name: str, inputs: int, outputs: int) -> NetworkLayer:
    """Return a layer without parameters."""
    return NetworkLayer(name, 0, 0, outputs, inputs)


def linear(name: str, inner: int, outer: int, rows: int = 1) -> NetworkLayer:
    """Return a linear layer with bias, for this number of rows per sample."""
    return NetworkLayer(name, (inner + 1) * outer, inner * outer * rows, outer * rows, inner * rows)


def vgg16() -> tuple[NetworkLayer, ...]:
    """VGG-16 (Simonyan and Zisserman, ICLR 2015, configuration D): 138,357,544 parameters."""
    layers, inner = [], 3
    for stage, (outer, count, side) in enumerate(
        ((64, 2, 224), (128, 2, 112), (256, 3, 56), (512, 3, 28), (512, 3, 14))
    ):
        for index in range(count):
            made = conv(f"conv{stage + 1}_{index + 1}", inner, outer, side * side, 9)
            layers.append(NetworkLayer(made.name, made.num_params + outer, made.macs, made.outputs, made.inputs))
            inner = outer
    return (*layers, linear("fc6", 25088, 4096), linear("fc7", 4096, 4096), linear("fc8", 4096, 1000))


def resnet(*counts: int) -> tuple[NetworkLayer, ...]:
    """ResNets of bottlenecks (He et al., CVPR 2016, table 1), as a flat sequence with everything that runs.

    Args:
        counts: bottlenecks of each stage; 3, 4, 6, 3 for ResNet-50 (25,557,032 parameters), 3, 4, 23, 3 for ResNet-101
            (44,549,160).
    """
    layers = [
        conv("stem", 3, 64, 112**2, 49, 224**2),
        norm("stem", 64, 112**2),
        parameterless("stem", 64 * 112**2, 64 * 112**2),
    ]
    layers.append(parameterless("stem", 64 * 112**2, 64 * 56**2))
    inner, side = 64, 56
    for stage, count in enumerate(counts):
        for index in range(count):
            stride = 2 if stage and not index else 1
            layers += bottleneck(f"layer{stage + 1}.{index}", inner, 64 * 2**stage, side, stride)
            inner, side = 256 * 2**stage, side // stride
    return (*layers, parameterless("fc", 2048 * 49, 2048), parameterless("fc", 2048, 2048), linear("fc", 2048, 1000))


def bottleneck(name: str, inner: int, width: int, side: int, stride: int) -> Iterator[NetworkLayer]:
    """Yield eleven layers: a branch, three convolutions with norms, two ReLUs between them, the sum, and a ReLU."""
    read, wrote, outer = side * side, (side // stride) ** 2, 4 * width
    yield parameterless(name, 0, 0)
    yield conv(name, inner, width, read, 1)
    yield from (norm(name, width, read), parameterless(name, width * read, width * read))
    yield conv(name, width, width, wrote, 9, read)
    yield from (norm(name, width, wrote), parameterless(name, width * wrote, width * wrote))
    yield conv(name, width, outer, wrote, 1)
    yield norm(name, outer, wrote)
    short = conv(name, inner, outer, wrote, 1, read)
    if inner != outer:  # the shortcut has a convolution and a norm of its own
        yield NetworkLayer(
            name, short.num_params + 2 * outer, short.macs, 3 * outer * wrote, short.inputs + 3 * outer * wrote
        )
    else:
        yield parameterless(name, 2 * outer * wrote, outer * wrote)
    yield parameterless(name, outer * wrote, outer * wrote)


def inception_v3() -> tuple[NetworkLayer, ...]:
    """Inception-v3 (Szegedy et al., CVPR 2016), without the second classifier: 23,834,568 parameters."""
    layers = [
        *conv_norms("stem", (3, 32, 149, 9), (32, 32, 147, 9), (32, 64, 147, 9), (64, 80, 73, 1), (80, 192, 71, 9))
    ]
    for index, inner in enumerate((192, 256, 288)):
        shapes = ((inner, 64, 1), (inner, 48, 1), (48, 64, 25), (inner, 64, 1), (64, 96, 9), (96, 96, 9))
        layers += conv_norms(
            f"mixed5{'bcd'[index]}", *((a, b, 35, k) for a, b, k in (*shapes, (inner, 64 if index else 32, 1)))
        )
    layers += conv_norms("mixed6a", (288, 384, 17, 9), (288, 64, 35, 1), (64, 96, 35, 9), (96, 96, 17, 9))
    for index, c in enumerate((128, 160, 160, 192)):
        far = ((768, c, 1), (c, c, 7), (c, 192, 7), (768, c, 1), (c, c, 7), (c, c, 7), (c, c, 7), (c, 192, 7))
        layers += conv_norms(
            f"mixed6{'bcde'[index]}", *((a, b, 17, k) for a, b, k in ((768, 192, 1), *far, (768, 192, 1)))
        )
    last = (
        (768, 192, 17, 1),
        (192, 320, 8, 9),
        (768, 192, 17, 1),
        (192, 192, 17, 7),
        (192, 192, 17, 7),
        (192, 192, 8, 9),
    )
    layers += conv_norms("mixed7a", *last)
    for index, inner in enumerate((1280, 2048)):
        wide = ((inner, 320, 1), (inner, 384, 1), (384, 384, 3), (384, 384, 3), (inner, 448, 1), (448, 384, 9))
        rest = ((384, 384, 3), (384, 384, 3), (inner, 192, 1))
        layers += conv_norms(f"mixed7{'bc'[index]}", *((a, b, 8, k) for a, b, k in (*wide, *rest)))
    return (*layers, linear("fc", 2048, 1000))


def conv_norms(name: str, *shapes: tuple[int, int, int, int]) -> Iterator[NetworkLayer]:
    """Yield convolutions with norms: input and output channels, output side, and kernel area."""
    for inner, outer, side, kernel in shapes:
        yield conv(name, inner, outer, side * side, kernel)
        yield norm(name, outer, side * side)


def bert_large(tokens: int = 512) -> tuple[NetworkLayer, ...]:
    """BERT-large (Devlin et al., NAACL 2019): 24 layers of width 1024, 335,141,888 parameters with its pooler."""
    width, rows = 1024, tokens
    layers = [NetworkLayer("embeddings", (30522 + 512 + 2 + 2) * width, 0, rows * width)]
    for index in range(24):
        made = [linear(f"layer{index}", width, width, rows) for _ in range(4)]
        made += [linear(f"layer{index}", width, 4 * width, rows), linear(f"layer{index}", 4 * width, width, rows)]
        products = 2 * rows * rows * width  # scores, and values by scores
        layers += [*made, NetworkLayer(f"layer{index}", 4 * width, products, rows * width)]
    return (*layers, linear("pooler", width, width))


def num_params(layers: Iterable[NetworkLayer]) -> int:
    """Return the number of parameters of layers."""
    return sum(layer.num_params for layer in layers)


def make_model_spec(layers: Iterable[NetworkLayer], grain: float = 0.0) -> ModelSpec:
    """Return a model with one block per run of layers with one name; cost is in multiplications.

    Args:
        layers: in order.
        grain: blocks are merged up to this fraction of all parameters or of all multiplications.
    """
    row = list(layers)
    enough = grain * num_params(row), grain * sum(layer.macs for layer in row)
    blocks: list[tuple[str, list[NetworkLayer]]] = []
    for layer in row:
        name, last = blocks[-1] if blocks else ("", [])
        is_small = num_params(last) < enough[0] and sum(one.macs for one in last) < enough[1]
        if blocks and (layer.name == name or is_small):
            last.append(layer)
            blocks[-1] = (layer.name, last)
        else:
            blocks.append((layer.name, [layer]))
    params = tuple(Param(f"{name}.weight", (num_params(run),)) for name, run in blocks)
    pieces = (
        LayerSpec(name, (f"{name}.weight",), float(sum(layer.macs for layer in run)), FLOAT * run[-1].outputs)
        for name, run in blocks
    )
    return ModelSpec(tuple(Block((piece,), index) for index, piece in enumerate(pieces)), params)
