"""What is damaged never loads, and the message says what, where and by which checksum."""

import json
import pathlib
import random
import re
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

from counterpoint.checkpoint import (
    Checkpoint,
    begin,
    commit,
    fingerprint,
    latest,
    load,
    save,
    verify,
    whole_tensor,
    write_shard,
)
from counterpoint.checkpoint.manifest import CheckpointManifest, _own_sha256, format_manifest, parse_manifest
from counterpoint.errors import CheckpointError
from tests.checkpoint.saved_states import holds_exactly, save_step
from tests.covering import given_few_or_many

SHARD = "shard-00000.safetensors"


def flip(path, position, bit=0):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def edit_manifest(folder, change):
    content = json.loads((folder / "manifest.json").read_text())
    change(content)
    del content["sha256"]
    content["sha256"] = _own_sha256(content)
    (folder / "manifest.json").write_text(json.dumps(content))


def error_of(path):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    return str(caught.value)


def test_a_flipped_byte_is_named_by_file_tensor_and_both_checksums(tmp_path):
    folder = save_step(tmp_path)
    flip(folder / SHARD, -10)
    message = error_of(folder)
    assert "step-00000001/shard-00000.safetensors is damaged: tensor 'fc.bias'" in message
    assert re.search(r"crc32 expected [0-9a-f]{8}, found [0-9a-f]{8}", message)
    assert "nothing was loaded" in message
    assert "open the folder above it for the" in message


def test_no_flipped_bit_anywhere_is_ever_loaded(tmp_path):
    folder = save_step(tmp_path)
    draw = random.Random(7)
    for name in (SHARD, "manifest.json"):
        data = (folder / name).read_bytes()
        for _ in range(150):
            position, bit = draw.randrange(len(data)), draw.randrange(8)
            flip(folder / name, position, bit)
            assert verify(folder).problems or holds_exactly(Checkpoint.open(folder), 1), (name, position, bit)
            (folder / name).write_bytes(data)


def test_a_file_cut_at_any_length_is_truncated_and_says_so(tmp_path):
    folder = save_step(tmp_path)
    data = (folder / SHARD).read_bytes()
    for length in range(0, len(data), 37):
        (folder / SHARD).write_bytes(data[:length])
        assert f"is truncated: {len(data):,} bytes expected, {length:,} found" in error_of(folder)


def test_a_missing_file_is_named_with_its_rank(tmp_path):
    folder = save_step(tmp_path)
    (folder / SHARD).unlink()
    assert re.search(r"shard-00000\.safetensors is missing \(\d+ bytes of rank 0\)", error_of(folder))
    (folder / "manifest.json").unlink()
    assert "step-00000001/manifest.json cannot be read: No such file or directory" in error_of(folder)


def test_swapped_shards_are_recognised_as_swapped(tmp_path):
    folder = save_through_two_equal_shards(tmp_path)
    (folder / SHARD).rename(folder / "x")
    (folder / "shard-00001.safetensors").rename(folder / SHARD)
    (folder / "x").rename(folder / "shard-00001.safetensors")
    assert f"{SHARD} has the bytes of shard-00001.safetensors: the files were swapped" in error_of(folder)


def save_through_two_equal_shards(root):
    with begin(root, 1) as draft:
        records = [write_shard(draft.folder, rank, [whole_tensor(f"w{rank}", torch.randn(8))]) for rank in range(2)]
        return commit(draft, records, state={})


def test_a_shard_of_another_step_is_refused(tmp_path):
    one, two = save_step(tmp_path, 1), save_step(tmp_path, 2)
    (one / SHARD).replace(two / SHARD)
    assert f"{SHARD} is the shard of step 1, rank 0, not that of step 2, rank 0" in error_of(two)


def test_a_link_in_place_of_a_file_is_refused(tmp_path):
    folder = save_step(tmp_path)
    (folder / SHARD).rename(tmp_path / "elsewhere")
    pathlib.Path(folder / SHARD).symlink_to(tmp_path / "elsewhere")
    assert "is not a regular file" in error_of(folder)


def test_a_file_that_does_not_belong_is_named(tmp_path):
    folder = save_step(tmp_path)
    (folder / "extra.bin").write_bytes(b"?")
    assert "step-00000001/extra.bin is not part of it;" in error_of(folder)


def test_a_byte_that_changes_after_opening_is_found_on_reading(tmp_path):
    checkpoint = Checkpoint.open(save_step(tmp_path), check="sizes")
    flip(checkpoint.folder / SHARD, -10)
    assert torch.equal(checkpoint.read("fc.weight"), load(save_step(tmp_path / "b"))[0]["fc.weight"])
    with pytest.raises(CheckpointError, match=r"is damaged: tensor 'fc.bias': crc32 expected"):
        checkpoint.read("fc.bias")


def test_the_newest_intact_checkpoint_loads_and_damaged_newer_ones_are_reported(tmp_path):
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    flip(tmp_path / "step-00000003" / SHARD, -1)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    result = Checkpoint.open(tmp_path)
    assert holds_exactly(result, 1)
    assert [skip.folder.name for skip in result.skipped] == ["step-00000003", "step-00000002"]
    assert "is damaged: tensor" in result.skipped[0].reason
    assert "cannot be read" in result.skipped[1].reason


def test_a_folder_with_only_damaged_checkpoints_lists_each(tmp_path):
    for step in (1, 2):
        flip(save_step(tmp_path, step) / SHARD, -1)
    with pytest.raises(
        CheckpointError, match=r"all 2 checkpoints in .* are damaged:\n  step-00000002/.*\n  step-00000001/"
    ):
        latest(tmp_path)


def test_an_empty_root_has_no_latest_but_cannot_be_opened(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "not-there") is None
    assert f"no checkpoint in {tmp_path}: the folder is empty" in error_of(tmp_path)
    assert "does not exist; give a" in error_of(tmp_path / "not-there")


def test_a_folder_without_checkpoint_says_what_is_there(tmp_path):
    for name in ("model.pt", "notes.txt"):
        (tmp_path / name).touch()
    assert "it has model.pt (a pickle, rejected), notes.txt; give a folder with" in error_of(tmp_path)


def test_a_pickle_is_refused_and_says_why(tmp_path):
    for name in ("model.pt", "weights"):
        torch.save({"x": torch.zeros(2)}, tmp_path / name)
        message = error_of(tmp_path / name)
        assert "is a pickle file, which can run arbitrary code when it is loaded, and" in message


def test_a_path_that_is_a_file_is_refused_on_both_ways(tmp_path):
    (tmp_path / "file").write_text("hello")
    assert "is a file, but a checkpoint is a folder" in error_of(tmp_path / "file")
    assert "is one file of a checkpoint; give its folder" in error_of(save_step(tmp_path) / SHARD)
    with pytest.raises(CheckpointError, match="is a file, but checkpoints need a folder"):
        save_step(tmp_path / "file")


def test_a_checkpoint_of_another_model_lists_the_first_differences(tmp_path):
    saved = {"conv1.weight": torch.zeros(8, 4), "conv2.weight": torch.zeros(3), "old.bias": torch.zeros(2)}
    folder = save(tmp_path, 1, saved, {}, model=fingerprint(saved))
    wanted = fingerprint(
        {"conv1.weight": torch.zeros(8, 2), "conv3.weight": torch.zeros(3), "old.bias": torch.zeros(2)}
    )
    with pytest.raises(CheckpointError, match="is a checkpoint of another model: 3 differences") as caught:
        load(folder, model=wanted)
    text = str(caught.value)
    assert "missing: conv3.weight float32[3] (the nearest is conv2.weight float32[3])" in text
    assert "changed: conv1.weight is float32[8, 4] in the checkpoint, float32[8, 2] in the model" in text
    assert "unexpected: conv2.weight float32[3]" in text


def test_a_model_that_was_not_saved_whole_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"'b' as float32\[2\], but the ranks wrote nothing"):
        save(tmp_path, 1, {"a": torch.zeros(2)}, {}, model=fingerprint({"b": torch.zeros(2)}))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.update(version=3), "has format version 3, this Counterpoint reads 1 and 2"),
        (lambda m: m.update(format="zip"), "has an unknown format"),
        (lambda m: m.update(surprise=1), "breaks the schema: surprise: unexpected keyword"),
        (lambda m: m["files"][0].update(file="../../etc/passwd"), r"files\[0\]\.file: string should match"),
        (lambda m: m["files"][0]["slices"][0].update(dtype="float31"), "has the unknown dtype 'float31'"),
        (lambda m: m["files"][0]["slices"][0].update(global_shape=[2**40, 2**40]), "is inconsistent"),
        (lambda m: m["files"][0]["slices"][0].update(stop=7), "but is recorded at"),
        (lambda m: m["files"].append(m["files"][0]), "rank 0 gave more than one record"),
        (lambda m: m.update(step=9), "is the checkpoint of step 9; was the folder renamed?"),
    ],
)
def test_a_forged_manifest_is_refused(tmp_path, change, text):
    folder = save_step(tmp_path)
    edit_manifest(folder, change)
    assert re.search(text, error_of(folder))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a":' * 100_000, "\xff", "null"])
def test_a_manifest_that_is_not_one_is_refused(tmp_path, text):
    folder = save_step(tmp_path)
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    assert "step-00000001/manifest.json is damaged" in error_of(folder)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given_few_or_many(3, 100, st.dictionaries(st.text(), json_values, max_size=3))
def test_the_state_comes_back_as_it_was(tmp_path_factory, state):
    path = tmp_path_factory.getbasetemp() / "manifest.json"
    path.write_bytes(format_manifest(CheckpointManifest("counterpoint-checkpoint", 1, 3, {}, {}, state, ())))
    result = parse_manifest(path).state
    assert result == state
    assert repr(result) == repr(state)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"rng": (1, 2)}, r"state\.rng is a tuple, which JSON cannot represent;"),
        ({"loss": [1.0, float("nan")]}, r"state\.loss\[1\] is nan, which JSON cannot represent;"),
        ({"groups": {3: "x"}}, "state.groups has the key 3, a int; keys are text"),
        ({"weights": torch.zeros(2)}, "state.weights is a Tensor"),
    ],
)
def test_a_state_that_is_not_json_is_refused_with_its_place(tmp_path, state, text):
    with pytest.raises(CheckpointError, match=text):
        save(tmp_path, 1, {}, state)
    assert list(tmp_path.iterdir()) == []


def test_a_draft_folder_is_no_checkpoint(tmp_path):
    with begin(tmp_path, 4):
        assert latest(tmp_path) is None
    with pytest.raises(CheckpointError, match="is not the folder of a save in progress"):
        write_shard(tmp_path, 0, [])


def test_a_rank_without_record_is_noticed(tmp_path):
    with begin(tmp_path, 1) as draft:
        first = write_shard(draft.folder, 0, [whole_tensor("a", torch.zeros(2))])
        write_shard(draft.folder, 1, [whole_tensor("b", torch.zeros(2))])
        with pytest.raises(CheckpointError, match=r"has shard-00001\.safetensors, but no record of it"):
            commit(draft, [first], state={})


def test_a_name_is_only_ever_data(tmp_path):
    names = ["../../x", "/etc/passwd", "a\nb", "", "ü", "x" * 4000, "__metadata__", "<script>"]
    folder = save(tmp_path, 1, {name: torch.ones(1) for name in names}, {})
    assert list(load(folder)[0]) == names
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", SHARD]


def test_saving_and_opening_leaves_no_open_file(tmp_path):
    save_step(tmp_path / "warm", 1)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for step in range(3):
        save_step(tmp_path, step, keep=1)
        load(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
