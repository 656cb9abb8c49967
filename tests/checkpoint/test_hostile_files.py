"""A file from elsewhere, whatever it is, is answered at once, in bounded memory, and never blocks an older checkpoint."""

import json
import math
import os
import random
import re
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from counterpoint.checkpoint import (
    Checkpoint,
    TensorSlice,
    add_part,
    begin,
    commit,
    join_draft,
    latest,
    recover_drafts,
    step_folders,
    verify,
    whole_tensor,
    write_shard,
)
from counterpoint.checkpoint.file_ops import LOCAL_FILES
from counterpoint.checkpoint.folders import prune
from counterpoint.checkpoint.manifest import MANIFEST
from counterpoint.checkpoint.tensor_slice import check_cover
from counterpoint.errors import CheckpointError
from tests.checkpoint.hostile_files import (
    SHARD,
    declare_boxes,
    forge,
    measure,
    replace_by_folder,
    replace_by_link,
    replace_by_pipe,
    write_bomb,
    write_forged,
)
from tests.checkpoint.saved_states import holds_exactly, save_step
from tests.other_user import STRANGER, as_root, as_user

MIB = 2**20


def make_sparse(path, num_bytes):
    with path.open("r+b") as file:
        file.truncate(num_bytes)


DAMAGES = {
    "a pipe as manifest": (lambda folder: replace_by_pipe(folder / MANIFEST), "cannot be read: it is a pipe, and only"),
    "a link to an endless device": (
        lambda folder: replace_by_link(folder / MANIFEST, "/dev/zero"), "cannot be read: it is a link, and only"),
    "a link to another manifest": (
        lambda folder: replace_by_link(folder / MANIFEST, f"../step-00000001/{MANIFEST}"), "it is a link"),
    "a folder as manifest": (lambda folder: replace_by_folder(folder / MANIFEST), "cannot be read: Is a directory"),
    "a manifest of a terabyte": (lambda folder: make_sparse(folder / MANIFEST, 2**40), "and such a file has at most"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "cannot be read: No such file or directory"),
    "half a manifest": (lambda folder: make_sparse(folder / MANIFEST, 300), "is damaged: not JSON"),
    "a newer format": (lambda folder: forge(folder, lambda m: m.update(version=3)), "has format version 3, this Counter"),
    "tensors of 14.9 GiB": (lambda folder: declare_boxes(folder, 2_000_000_000), "is truncated: 4,000,000,"),
    "a shape that overflows": (
        lambda folder: forge(folder, lambda m: m["files"][0]["slices"][0].update(global_shape=[2**62, 2**62])),
        "a tensor has at most 64 dims and"),
    "a shape that hides behind a zero": (
        lambda folder: forge(folder, lambda m: m["files"][0]["slices"][0].update(shape=[0, 2**62, 2**62])), "at most 64 dims"),
    "a negative size": (
        lambda folder: forge(folder, lambda m: m["files"][0].update(num_bytes=-1)), "breaks the schema: files.0..num_bytes"),
    "a tensor twice": (
        lambda folder: forge(folder, lambda m: m["files"][0]["slices"].append(m["files"][0]["slices"][-1])), "the same key"),
    "a name that leads elsewhere": (
        lambda folder: forge(folder, lambda m: m["files"][0].update(file="../step-00000001/" + SHARD)), "breaks the schema"),
    "a model that is not there": (
        lambda folder: forge(folder, lambda m: m["model"].update(x="float32[9]")), "the model has 'x' as float32.9., but"),
    "a pipe as shard": (lambda folder: replace_by_pipe(folder / SHARD), "is not a regular file"),
    "a device as shard": (lambda folder: replace_by_link(folder / SHARD, "/dev/zero"), "is not a regular file"),
    "a folder as shard": (lambda folder: replace_by_folder(folder / SHARD), "is not a regular file"),
    "a shard of a terabyte": (lambda folder: make_sparse(folder / SHARD, 2**40), "has grown"),
    "a truncated shard": (lambda folder: make_sparse(folder / SHARD, 100), "is truncated"),
    "no shard": (lambda folder: (folder / SHARD).unlink(), "is missing"),
    "a shard of another step": (
        lambda folder: (folder / SHARD).write_bytes((folder.parent / "step-00000001" / SHARD).read_bytes()),
        "is the shard of step 1, rank 0, not that of step 2"),
    "a file that nobody may read": (lambda folder: (folder / MANIFEST).chmod(0), "Permission denied"),
    "a shard that nobody may read": (lambda folder: (folder / SHARD).chmod(0), "Permission denied"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_newest_checkpoint_is_told_at_once_and_the_one_before_is_loaded(name, tmp_path):
    damage, reason = DAMAGES[name]
    if "nobody" in name and os.geteuid() == 0:
        pytest.skip("root may read everything")
    save_step(tmp_path, 1)
    damage(save_step(tmp_path, 2))
    found = []
    seconds, num_bytes = measure(lambda: found.append(Checkpoint.open(tmp_path)))
    assert holds_exactly(found[0], 1)
    assert [skip.folder.name for skip in found[0].skipped] == ["step-00000002"]
    with pytest.raises(CheckpointError, match=reason):
        Checkpoint.open(tmp_path / "step-00000002")
    assert seconds < 1
    assert num_bytes < 32 * MIB


def test_a_folder_that_is_a_link_is_passed_over_below_the_named_one_and_followed_if_it_is_named(tmp_path):
    save_step(tmp_path / "a", 1)
    (tmp_path / "a" / "step-00000002").symlink_to(save_step(tmp_path / "b", 2))
    found = latest(tmp_path / "a")
    assert found is not None
    assert holds_exactly(found, 1)
    assert found.skipped[0].reason.startswith("step-00000002 is a link, and links in a folder of checkpoints are not")
    assert holds_exactly(Checkpoint.open(tmp_path / "a" / "step-00000002"), 2)


def test_a_link_to_itself_or_to_nothing_hides_no_checkpoint_and_keeps_none_from_being_saved(tmp_path):
    save_step(tmp_path, 1)
    for step, target in ((2, "step-00000002"), (3, "nowhere")):
        (tmp_path / f"step-{step:08d}").symlink_to(target)
    found = Checkpoint.open(tmp_path)
    assert holds_exactly(found, 1)
    assert [skip.reason.partition(",")[0] for skip in found.skipped] == ["step-00000002 is a link"]
    for step in (2, 3):
        with pytest.warns(RuntimeWarning, match=f"step-0000000{step} was damaged .*; it was renamed"):
            save_step(tmp_path, step)
        assert holds_exactly(Checkpoint.open(tmp_path), step)


NAMES = {"a name that is too long": "a" * 300, "a null byte": "a\0b", "a link to itself": "loop"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("read", [Checkpoint.open, latest, recover_drafts, step_folders, lambda path: begin(path, 1)])
def test_a_path_that_leads_nowhere_is_a_checkpoint_error(read, name, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError, match=r"too long|null byte|Too many levels"):
        read(tmp_path / NAMES[name])


@as_root
@pytest.mark.parametrize("mode", [0o700, 0o744])
def test_a_folder_that_this_user_may_not_read_is_a_checkpoint_error(mode, tmp_path):
    save_step(tmp_path / "a", 1)
    tmp_path.chmod(0o755)
    (tmp_path / "a").chmod(mode)
    for read in (Checkpoint.open, latest, lambda path: begin(path, 2)):
        with as_user(STRANGER), pytest.raises(CheckpointError, match="Permission denied"):
            read(tmp_path / "a")


def test_removing_old_checkpoints_never_deletes_through_a_link(tmp_path):
    """It deleted the files of the folder to which the link led."""
    precious = tmp_path / "elsewhere" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("years of work")
    root = tmp_path / "a"
    for step in (2, 3):
        save_step(root, step)
    (root / "step-00000001").symlink_to(precious.parent)
    prune(LOCAL_FILES, root, 3, keep=1, run_id=None)
    assert precious.read_text() == "years of work"
    assert [path.name for path in root.iterdir()] == ["step-00000003"]


BOMBS = {
    "lists": lambda size: "[" + "[]," * (size // 3) + "0]",
    "objects": lambda size: "[" + "{}," * (size // 3) + "0]",
    "pairs": lambda size: "[" + '{"a":0},' * (size // 8) + "0]",
    "numbers": lambda size: "[" + "1234," * (size // 5) + "0]",
    "sparse lists": lambda size: "[" + ("[]," + " " * 40) * (size // 43) + "0]",
    "nested lists": lambda size: "[" * (size // 2) + "]" * (size // 2),
    "digits": lambda size: "9" * size,
    "a text": lambda size: json.dumps("x" * size),
}


@pytest.mark.long(quick=["sparse lists-state", "digits-state"])
@pytest.mark.parametrize("place", ["state", "slices"])
@pytest.mark.parametrize("name", BOMBS)
def test_a_manifest_takes_at_most_four_times_its_size(name, place, tmp_path):
    folder = save_step(tmp_path)
    write_bomb(folder, place, BOMBS[name](2 * MIB))
    reports = []
    seconds, num_bytes = measure(lambda: reports.append(verify(folder)))
    assert place == "state" or reports[0].problems
    assert all(len(problem) < 1000 for problem in reports[0].problems)
    assert seconds < 1
    assert num_bytes < 4 * (folder / MANIFEST).stat().st_size + 16 * MIB


def test_many_slices_are_checked_in_the_time_of_their_number(tmp_path):
    """The declared sizes of 5,000 boxes and ranges, of 10**15 elements, cost nothing."""
    rows, columns = 10**9, 10**6
    boxes = [Extent((1000, columns), (at * 1000, 0), (rows, columns)) for at in range(5000)]
    rest = Extent((rows * columns - 5000 * 1000 * columns,), 5000 * 1000 * columns, (rows, columns))
    seconds, num_bytes = measure(lambda: check_cover("w", [*boxes, rest]))
    with pytest.raises(CheckpointError, match="flat element 999,000,000,000 is missing"):
        check_cover("w", [*boxes[:999], *boxes[1000:], rest])
    grid = [Extent((1, 1), (at, at), (3000, 3000)) for at in range(3000)]
    with pytest.raises(CheckpointError, match="the 3000 slices of 'w' divide it into 9000000 parts; at most"):
        check_cover("w", grid)
    assert seconds < 1
    assert num_bytes < 32 * MIB


@dataclass(frozen=True)
class Extent:
    shape: tuple[int, ...]
    offset: int | tuple[int, ...]
    global_shape: tuple[int, ...]
    name: str = "w"

    def elements(self):
        flat = np.arange(math.prod(self.global_shape))
        if isinstance(self.offset, int):
            return flat[self.offset : self.offset + math.prod(self.shape)]
        box = tuple(slice(at, at + length) for at, length in zip(self.offset, self.shape, strict=True))
        return flat.reshape(self.global_shape)[box].reshape(-1)


@st.composite
def extents(draw):
    """Draw slices of a small tensor that may intersect or leave holes, most of them inside."""
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=0, max_size=3)))
    total = math.prod(shape)
    slices = []
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            start = draw(st.integers(0, total))
            slices.append(Extent((draw(st.integers(0, total - start)),), start, shape))
        else:
            first = tuple(draw(st.integers(0, length - 1)) for length in shape)
            box = tuple(draw(st.integers(0, length - at)) for length, at in zip(shape, first, strict=True))
            slices.append(Extent(box, first, shape))
    return slices


@given(extents())
def test_slices_cover_a_tensor_if_each_element_is_in_one_of_them(slices):
    counts = np.bincount(
        np.concatenate([part.elements() for part in slices]), minlength=math.prod(slices[0].global_shape)
    )
    if (counts == 1).all():
        check_cover("w", slices)
        return
    with pytest.raises(CheckpointError) as caught:
        check_cover("w", slices)
    found = re.search(r"flat element ([0-9]+) is (missing|duplicated)", str(caught.value))
    assert found is not None
    assert (counts[int(found[1])] == 0) == (found[2] == "missing")
    assert counts[int(found[1])] != 1


PARTS = {
    "a pipe": replace_by_pipe,
    "an endless device": lambda path: replace_by_link(path, "/dev/zero"),
    "a number of ranks for which there is no memory": lambda path: path.write_text(
        path.read_text().replace('"num_ranks": 1', '"num_ranks": 1000000000000')
    ),
    "no object": lambda path: path.write_text("[1]"),
    "lists": lambda path: path.write_text("[" + "[]," * 10**7 + "0]"),
}


@pytest.mark.long(quick=["a number of ranks for which there is no memory", "no object", "an endless device", "a pipe"])
@pytest.mark.parametrize("name", PARTS)
def test_a_damaged_part_of_a_draft_is_told_and_not_recovered(name, tmp_path):
    draft = join_draft(tmp_path, 1, "ab")
    add_part(draft, (0, 1), [whole_tensor("w", torch.ones(3))], {})
    draft.release()
    PARTS[name](draft.folder / "part-00000.json")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seconds, num_bytes = measure(lambda: recover_drafts(tmp_path))
    assert latest(tmp_path) is None
    assert len(caught) == (name != "a number of ranks for which there is no memory")  # which only waits for them
    assert seconds < 1
    assert num_bytes < 4 * 30 * MIB + 32 * MIB


def mutate(value, draw):
    """Change one value somewhere in JSON."""
    if isinstance(value, dict | list) and value and draw.random() < 0.9:
        key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value[key] = mutate(value[key], draw)
        return value
    return draw.choice([None, True, -1, 0, 7, 2**40, 2**70, 1.5, "", "x", "../x", "\0", [], {}, [0, 2**62], {"a": []}])


def test_no_change_of_a_manifest_raises_anything_else_or_loads_other_tensors(tmp_path):
    with begin(tmp_path, 1) as draft:
        halves = [TensorSlice("w", torch.arange(3.0) + 3 * at, (2, 3), 3 * at) for at in range(2)]
        records = [write_shard(draft.folder, rank, [half]) for rank, half in enumerate(halves)]
        folder = commit(draft, records, state={"epoch": 1})
    original, draw, num_loaded = (folder / MANIFEST).read_text(), random.Random(5), 0
    for _ in range(400):
        content = json.loads(original)
        key = draw.choice(list(content))
        write_forged(folder, {**content, key: mutate(content[key], draw)})
        try:
            checkpoint = Checkpoint.open(folder)
        except CheckpointError:
            continue
        num_loaded += 1
        assert torch.equal(checkpoint.read("w"), torch.arange(6.0).view(2, 3))
    assert 0 < num_loaded < 200


def test_no_flip_or_cut_of_a_file_raises_anything_else_or_loads_other_tensors(tmp_path):
    folder, draw = save_step(tmp_path), random.Random(6)
    for name in (MANIFEST, SHARD):
        original = (folder / name).read_bytes()
        for _ in range(200):
            data = bytearray(original[: draw.choice([None, draw.randrange(len(original))])])
            for _ in range(draw.randrange(4)):
                at = draw.randrange(len(data) + 1)
                data[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
            (folder / name).write_bytes(data)
            report = verify(folder)
            assert report.problems or holds_exactly(Checkpoint.open(folder), 1)
        (folder / name).write_bytes(original)
