"""The schema of what a training run saves besides tensors; a checkpoint with another state is a damaged one."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from typing import Any

import torch

from counterpoint.checkpoint import Checkpoint
from counterpoint.checkpoint.manifest import SliceRecord
from counterpoint.checkpoint.reader import state_error
from counterpoint.checkpoint.state_schema import (
    COUNT,
    FLAG,
    MAX_INT,
    NUMBER,
    POSITIVE,
    TEXT,
    ValueSchema,
    describe_value,
    is_count,
    is_number,
    list_of,
    mapping,
    mapping_of,
    optional,
)
from counterpoint.checkpoint.tensor_slice import DTYPES, MAX_DIMS, torch_dtype
from counterpoint.errors import CheckpointError, ProtocolError
from counterpoint.optim.validation import shorten
from counterpoint.runtime.loss.loss_scale import MAX_SCALE
from counterpoint.value_codec import decode_value


def is_scalar(value: object) -> bool:
    """Return whether a value is a number of an optimizer's state, or one with the dtype that holds it."""
    if not isinstance(value, list):
        return value is None or type(value) is bool or is_number(value)
    if len(value) != 2 or not isinstance(value[1], str) or value[1] not in DTYPES:
        return False
    number, dtype = value[0], torch_dtype(value[1])
    if dtype == torch.bool:
        return type(number) is bool
    if dtype.is_floating_point:
        return is_number(number)
    limits = None if dtype.is_complex else torch.iinfo(dtype)
    return limits is not None and type(number) is int and limits.min <= number <= limits.max


def is_slicing(value: object) -> bool:
    """Return whether a value is the dim in which a parameter is sharded, and the number of its shards."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(map(is_count, value))
        and value[0] < MAX_DIMS
        and value[1] > 0
    )


def is_option(value: object) -> bool:
    """Return whether a value is an option of an optimizer that a scheduler may change."""
    return all(type(item) is bool or is_number(item) for item in (value if isinstance(value, list) else [value]))


ANY = ValueSchema("a value", lambda _: True)
SCALAR = ValueSchema("a number, null, or [a number, the dtype that holds it]", is_scalar)
SLICING = ValueSchema("[a dim, a number of shards]", is_slicing)
OPTION = ValueSchema("a number or a list of numbers", is_option)
GROUP_OPTIONS = ValueSchema(
    "the options of a parameter group, without its parameters",
    lambda value: isinstance(value, dict) and not value.keys() & {"params", "param_names"},
    OPTION,
)
SEED = ValueSchema("a whole number of 64 bits", lambda value: type(value) is int and abs(value) < 2 * MAX_INT + 2)
LOSS_SCALE = ValueSchema(
    "a positive number of float32", lambda value: type(value) in {int, float} and 0 < value <= MAX_SCALE
)
SCHEDULE = ValueSchema("an object or null", lambda value: value is None or isinstance(value, dict))
FACT = ValueSchema("a text or a number", lambda value: type(value) is str or is_number(value))

DATASET = ValueSchema(
    "an object of texts and numbers, with a type_name",
    lambda value: isinstance(value, dict) and "type_name" in value,
    FACT,
)

TRAIN_STATE = mapping(
    step=COUNT,
    cursor=mapping(epoch=COUNT, batch=COUNT),
    plan=TEXT,
    run_id=optional(TEXT),
    replicas=optional(POSITIVE),
    has_center=optional(FLAG),
    delayed_grads=optional(mapping(replicas=COUNT, skipped=FLAG, mean_factor=optional(NUMBER))),
    loss_scale=optional(mapping(scale=LOSS_SCALE, num_good_steps=COUNT, hysteresis=POSITIVE)),
    slices=mapping_of(SLICING),
    model=mapping_of(TEXT),
    optimizer=optional(
        mapping(class_name=TEXT, param_groups=list_of(mapping(params=list_of(TEXT), options=mapping_of(ANY))))
    ),
    state_dict=optional(mapping_of(TEXT)),
    scalars=mapping_of(mapping_of(SCALAR)),
    extra=mapping(
        schedule=optional(SCHEDULE),
        data=optional(TEXT),
        dataset=optional(DATASET),
        batch_size=optional(POSITIVE),
        seed=optional(SEED),
        optimizer=optional(TEXT),
        options=optional(list_of(GROUP_OPTIONS)),
        rng=optional(mapping_of(list_of(TEXT))),
    ),
)


def check_train_state(checkpoint: Checkpoint) -> None:
    """Check that the state of a checkpoint is that of a training run, and that its tensors are those it names.

    Raises:
        CheckpointError: a value is missing or wrong; the message has the file, the value, the rule and the remedy.
    """
    if not is_of_training(checkpoint):
        raise CheckpointError(
            f"{checkpoint.folder} is a checkpoint, but not one of a training run: its state has "
            f"{shorten(', '.join(checkpoint.state)) or 'nothing'}; read its tensors with "
            "counterpoint.checkpoint.load(folder)"
        )
    flaw = TRAIN_STATE.find_flaw(checkpoint.state, "state") or find_tensor_flaw(checkpoint)
    if flaw:
        raise state_error(checkpoint, flaw)


def check_known_state(checkpoint: Checkpoint) -> None:
    """Check the state of a checkpoint if a training run has written it; other programs have states of their own.

    Raises:
        CheckpointError: as :func:`check_train_state`.
    """
    if is_of_training(checkpoint):
        check_train_state(checkpoint)


def is_of_training(checkpoint: Checkpoint) -> bool:
    """Return whether a training run has written a checkpoint."""
    return not checkpoint.state.keys().isdisjoint({"cursor", "slices", "scalars"})


def decode_position(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the position in the data that a checkpoint has; empty if it has none.

    Raises:
        CheckpointError: it is damaged.
    """
    extra: Any = checkpoint.state["extra"]
    try:
        position = decode_value(b64decode(extra["data"], validate=True)) if "data" in extra else {}
    except (ValueError, ProtocolError) as error:
        raise state_error(checkpoint, f"state.extra.data is not an encoded value ({shorten(str(error))})") from error
    if not isinstance(position, dict):
        raise state_error(checkpoint, f"state.extra.data is {describe_value(position)}, but must be an object")
    return position


def find_scalar_flaw(checkpoint: Checkpoint, own: Mapping[str, Any]) -> str:
    """Return where the numbers of the optimizer's state are none that this optimizer keeps; an empty text if they are.

    Args:
        checkpoint: whose state has been checked.
        own: the numbers that this optimizer keeps for each parameter.
    """
    state: Any = checkpoint.state
    has_state = {name.partition(":")[2] for name in checkpoint.slices if name.startswith("optimizer.")}
    for name, scalars in state["scalars"].items():
        path = f"state.scalars[{shorten(repr(name))}]"
        for key, value in own.items():
            if value is None or (key not in scalars and not scalars and name not in has_state):
                continue
            kind = type(value).__name__
            if key not in scalars:
                return f"{path} has no {key!r}, but this optimizer keeps a {kind}"
            saved, number = scalars[key], scalars[key][0] if isinstance(scalars[key], list) else scalars[key]
            is_number = number is not None and type(number) is not bool and (key != "step" or number >= 0)
            if not is_number or isinstance(saved, list) != isinstance(value, torch.Tensor):
                return f"{path}[{key!r}] is {describe_value(saved)}, but this optimizer keeps a {kind}, 0 or more"
    return ""


def find_tensor_flaw(checkpoint: Checkpoint) -> str:
    """Return where the tensors are not those that the state names; an empty text if they are."""
    state: Any = checkpoint.state
    num_tensors = len(checkpoint.slices)
    counts = {
        "replicas": state.get("replicas", 1),
        "delayed_grads.replicas": state.get("delayed_grads", {}).get("replicas", 0),
    }
    counts |= {f"slices[{shorten(repr(name))}]": count for name, (_, count) in state["slices"].items()}
    for name, count in counts.items():
        if count > max(num_tensors, 1):
            return f"state.{name} is {count}, but the checkpoint has only {num_tensors} tensors"
    for name, ((_, record), *_) in checkpoint.slices.items():
        kind, _, rest = name.partition(":")
        base = rest.split("@")[0].split("~")[0]
        if kind in {"model", "frozen", "buffer"} and base in state["model"]:
            expected, (dim, _) = state["model"][base].removesuffix(" frozen"), state["slices"].get(base, (None, 1))
            if not has_shape(record, expected, dim if "@" in rest else None):
                facts = f"{shorten(expected)}, but the tensor {shorten(name)} is {record.dtype_and_shape}"
                return f"state.model[{shorten(base)!r}] is {facts}"
    return ""


def has_shape(record: SliceRecord, expected: str, sharded_dim: int | None) -> bool:
    """Return whether a tensor has a dtype and a shape, such as ``float32[10, 64]``, or is a shard of such a one."""
    if sharded_dim is None:
        return record.dtype_and_shape == expected
    lengths = expected.removeprefix(f"{record.dtype}[").removesuffix("]").split(", ")
    return sharded_dim < len(lengths) == len(record.global_shape) and all(
        dim == sharded_dim or str(length) == expected_length
        for dim, (length, expected_length) in enumerate(zip(record.global_shape, lengths, strict=True))
    )
