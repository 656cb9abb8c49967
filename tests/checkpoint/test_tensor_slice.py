"""Pieces: any layout loads into any other."""

import hashlib
import json
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from counterpoint.checkpoint import (
    Checkpoint,
    ShardRecord,
    TensorSlice,
    begin,
    commit,
    load,
    save,
    whole_tensor,
    write_shard,
)
from counterpoint.checkpoint.tensor_slice import DTYPES, torch_dtype
from counterpoint.errors import CheckpointError
from tests.covering import given_few_or_many


def commit_pieces(root, *pieces_of_ranks):
    with begin(root, 3) as draft:
        records = [write_shard(draft.folder, rank, pieces) for rank, pieces in enumerate(pieces_of_ranks)]
        sent = [ShardRecord.from_json(record.to_json()) for record in records]
        return Checkpoint.open(commit(draft, sent, state={}))


def columns(name, tensor, widths):
    starts = [sum(widths[:index]) for index in range(len(widths))]
    return [
        TensorSlice(name, tensor[:, start : start + width], tuple(tensor.shape), (0, start))
        for start, width in zip(starts, widths, strict=True)
    ]


def ranges(name, tensor, cuts):
    flat, bounds = tensor.reshape(-1), [0, *sorted(cuts), tensor.numel()]
    return [TensorSlice(name, flat[start:stop], tuple(tensor.shape), start) for start, stop in pairwise(bounds)]


def test_column_shards_load_as_any_flat_range(tmp_path):
    full = torch.randn(4, 6)
    checkpoint = commit_pieces(tmp_path, *[[piece] for piece in columns("w", full, [2, 1, 3])])
    assert torch.equal(checkpoint.read("w"), full)
    for start in range(25):
        for stop in range(start, 25):
            assert torch.equal(checkpoint.read_slice("w", start, stop), full.reshape(-1)[start:stop])


@given_few_or_many(10, 40, st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_flat_shards_load_as_the_whole_and_as_any_range(tmp_path_factory, shape, data):
    full = torch.arange(math.prod(shape)).reshape(shape)
    cuts = data.draw(st.lists(st.integers(0, full.numel()), max_size=4))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, full.numel())] * 2)))
    root = tmp_path_factory.mktemp("flat")
    checkpoint = commit_pieces(root, *[[piece] for piece in ranges("w", full, cuts)])
    assert torch.equal(checkpoint.read("w"), full)
    assert torch.equal(checkpoint.read_slice("w", start, stop), full.reshape(-1)[start:stop])


def test_boxes_and_flat_ranges_of_one_tensor_fit_together(tmp_path):
    full = torch.randn(5, 4, 2)
    top = [TensorSlice("w", full[:3, :, at : at + 1], (5, 4, 2), (0, 0, at)) for at in range(2)]
    rest = TensorSlice("w", full[3:].reshape(-1), (5, 4, 2), 24)
    checkpoint = commit_pieces(tmp_path, [top[0], rest], [top[1]])
    assert torch.equal(checkpoint.read("w"), full)
    assert torch.equal(checkpoint.read_slice("w", 13, 33), full.reshape(-1)[13:33])


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_listed_dtype_comes_back_bit_for_bit_from_us_and_from_safetensors(tmp_path, name):
    value = torch.randint(0, 2, (3, 4), dtype=torch.uint8).to(torch_dtype(name))
    folder = save(tmp_path, 1, {"x": value, "empty": value[:0], "scalar": value[0, 0]}, {})
    tensors, _ = load(folder)
    assert tensors["empty"].shape == (0, 4)
    assert tensors["scalar"].shape == ()
    file = load_file(folder / "shard-00000.safetensors")
    for result in (tensors["x"], file["x"]):
        assert result.dtype == value.dtype
        assert torch.equal(result.contiguous().view(torch.uint8), value.contiguous().view(torch.uint8))


def test_tensors_have_their_names_in_the_file_and_parts_their_ranges(tmp_path):
    full = torch.arange(24.0).reshape(4, 6)
    left, right = columns("fc.weight", full, [2, 4])
    halves = [TensorSlice("w", full.reshape(-1)[start : start + 12], (4, 6), start) for start in (0, 12)]
    whole = TensorSlice("__metadata__", full, (4, 6), (0, 0))
    checkpoint = commit_pieces(tmp_path, [left, halves[0], whole], [right, halves[1]])
    assert torch.equal(checkpoint.read("__metadata__"), full)
    with safe_open(checkpoint.folder / "shard-00000.safetensors", framework="pt") as file:
        assert set(file.keys()) == {"fc.weight[0:4,0:2]", "w[0:12]", "__metadata__'"}
        assert torch.equal(file.get_tensor("w[0:12]"), halves[0].tensor)


def test_a_checkpoint_of_the_first_format_is_read(tmp_path):
    """The tensors of a file had numbers."""
    folder = save(tmp_path, 1, {"fc.weight": torch.ones(2, 3)}, {})
    shard, manifest = folder / "shard-00000.safetensors", folder / "manifest.json"
    content = shard.read_bytes().replace(b'"fc.weight"', b'"tensor-00"')  # as long as the name
    shard.write_bytes(content)
    text = json.loads(manifest.read_text())
    text["version"], text["files"][0]["sha256"] = 1, hashlib.sha256(content).hexdigest()
    text["files"][0]["slices"][0]["key"] = "tensor-00"
    del text["sha256"]
    sha256 = hashlib.sha256(json.dumps(text, separators=(",", ":")).encode()).hexdigest()
    manifest.write_text(json.dumps({**text, "sha256": sha256}))
    assert torch.equal(load(folder)[0]["fc.weight"], torch.ones(2, 3))


def test_views_and_gradients_are_saved_as_values(tmp_path):
    weight = torch.nn.Parameter(torch.randn(3, 4))
    tensors, _ = load(save(tmp_path, 1, {"turned": weight.t(), "strided": weight[:, ::2]}, {}))
    assert torch.equal(tensors["turned"], weight.t())
    assert torch.equal(tensors["strided"], weight[:, ::2])


def test_a_hole_between_pieces_is_refused_with_its_place(tmp_path):
    full = torch.randn(4, 6)
    left, _, right = columns("w", full, [2, 1, 3])
    with pytest.raises(CheckpointError, match=r"'w' \[4, 6\] have 20 of 24 elements, flat element 2 is missing;"):
        commit_pieces(tmp_path, [left], [right])
    assert list(tmp_path.iterdir()) == []


def test_two_ranks_that_write_the_same_elements_are_refused(tmp_path):
    full = torch.randn(2, 3)
    with pytest.raises(CheckpointError, match="flat element 0 is duplicated; every element must be written by exactly"):
        commit_pieces(tmp_path, [whole_tensor("w", full)], [whole_tensor("w", full)])


def test_a_duplicate_that_hides_a_hole_is_still_found(tmp_path):
    full = torch.randn(6)
    with pytest.raises(CheckpointError, match="6 of 6 elements, flat element 2 is duplicated;"):
        commit_pieces(tmp_path, [TensorSlice("w", full[:3], (6,), 0), TensorSlice("w", full[:3], (6,), 2)])


@pytest.mark.parametrize("offset", [-1, 3, (2,), (0, 0)])
def test_a_piece_outside_its_tensor_is_refused(tmp_path, offset):
    with (
        begin(tmp_path, 1) as draft,
        pytest.raises(CheckpointError, match=r"shape \[4\] .* outside the global shape"),
    ):
        write_shard(draft.folder, 0, [TensorSlice("w", torch.zeros(4), (5,), offset)])


def test_a_sparse_tensor_is_refused_by_name(tmp_path):
    with (
        begin(tmp_path, 1) as draft,
        pytest.raises(CheckpointError, match=r"'emb' .* cannot be saved; a checkpoint can have"),
    ):
        write_shard(draft.folder, 0, [whole_tensor("emb", torch.zeros(3, 3).to_sparse())])


def test_a_tensor_whose_name_cannot_be_encoded_is_refused(tmp_path):
    with (
        begin(tmp_path, 1) as draft,
        pytest.raises(CheckpointError, match=r"its name has no form in UTF-8; rename the module"),
    ):
        write_shard(draft.folder, 0, [whole_tensor("a\udcff", torch.zeros(3))])


def test_pieces_that_disagree_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"different global shapes: \[4\] and \[6\]"):
        commit_pieces(tmp_path, [TensorSlice("w", torch.zeros(3), (4,), 0), TensorSlice("w", torch.zeros(3), (6,), 3)])
    with pytest.raises(CheckpointError, match="'w' have different dtypes: float32, float64"):
        commit_pieces(
            tmp_path, [TensorSlice("w", torch.zeros(3), (6,), 0), TensorSlice("w", torch.zeros(3).double(), (6,), 3)]
        )


def test_a_range_that_is_not_there_is_refused(tmp_path):
    checkpoint = commit_pieces(tmp_path, [whole_tensor("w", torch.zeros(2, 3))])
    with pytest.raises(CheckpointError, match=r"no range 4 to 7 in 'w' \[2, 3\]; it has 6 elements"):
        checkpoint.read_slice("w", 4, 7)
    with pytest.raises(CheckpointError, match="has no tensor 'v'; it has w"):
        checkpoint.read("v")
