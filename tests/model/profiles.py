"""Profiles made by hand, for models of equal layers."""

from counterpoint.model.model_profile import (
    BatchSizeProfile,
    LayerProfile,
    ModelProfile,
    Overheads,
    ProfiledOn,
    layer_keys,
    param_sizes,
)
from counterpoint.model.spec import ModelSpec

NO_OVERHEADS = Overheads()


def layer_profile(forward_s, backward_s=0.0, saved_bytes=0.0):
    """What a piece took; a third of its backward is the part for inputs."""
    return LayerProfile(forward_s, backward_s, backward_s / 4, 3 * backward_s / 4, 0.0, saved_bytes)


def build_profile(
    model: ModelSpec, layers, *, samples=1, unpartitioned=None, overheads=NO_OVERHEADS, **per_byte
) -> ModelProfile:
    """The timing of a model whose pieces took so long for so many samples; the whole as long as all of them."""
    total = unpartitioned or layer_profile(sum(one.forward_s for one in layers), sum(one.backward_s for one in layers))
    point = BatchSizeProfile(samples, tuple(layers), total)
    machine = ProfiledOn("a core", 1, "SGD")
    return ModelProfile(
        "Chain", layer_keys(model), param_sizes(model), machine, (point,), overheads=overheads, **per_byte
    )
