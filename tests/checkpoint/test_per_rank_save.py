"""Ranks that save when they come there: the newest step of which no part is missing loads, wherever anybody stops."""

import shutil

import pytest
from hypothesis import given, settings, strategies as st

from counterpoint.checkpoint import (
    Checkpoint,
    add_part,
    cleanup_drafts,
    commit_if_complete,
    is_pending,
    join_draft,
    latest,
    recover_drafts,
    verify,
    whole_tensor,
)
from counterpoint.checkpoint.file_ops import LOCAL_FILES, LocalFileOps
from counterpoint.errors import CheckpointError
from counterpoint.testing.failing_disk import FailingDisk, SimulatedCrash
from tests.checkpoint.saved_states import holds_exactly, save_step, tensors

RUN = "0123abcd"
HALF = {0: ["fc.weight", "steps"], 1: ["fc.bias"]}


def add(root, step, rank, *, files=LOCAL_FILES, run=RUN, keep=None):
    """One rank has come to a step and writes; it dies afterwards, if it has not before."""
    draft = join_draft(root, step, run, files=files)
    try:
        pieces = [whole_tensor(name, tensors(step)[name]) for name in HALF[rank]]
        add_part(draft, (rank, 2), pieces, {"epoch": step} if rank == 0 else {}, files=files)
        return commit_if_complete(draft, keep=keep, files=files)
    finally:
        draft.release()


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_the_last_part_makes_the_checkpoint_whosever_it_is(tmp_path, ranks):
    assert add(tmp_path, 1, ranks[0]) is None
    assert latest(tmp_path) is None
    path = add(tmp_path, 1, ranks[1])
    assert holds_exactly(Checkpoint.open(tmp_path), 1)
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json", "shard-00000.safetensors", "shard-00001.safetensors",
    ]  # fmt: skip
    assert not verify(path).problems


class Overtaken(LocalFileOps):
    """The other rank finds the draft whole as soon as this one's part has its name."""

    def __init__(self, other):
        self.other = other

    def rename(self, source, target):
        super().rename(source, target)
        self.other()


def test_a_rank_may_commit_while_the_last_part_is_still_being_synced(tmp_path):
    add(tmp_path, 1, 0)
    early = join_draft(tmp_path, 1, RUN)
    assert add(tmp_path, 1, 1, files=Overtaken(lambda: early.folder.exists() and commit_if_complete(early))) is None
    early.release()
    assert holds_exactly(Checkpoint.open(tmp_path), 1)


@settings(max_examples=15)
@given(st.lists(st.sampled_from([0, 1]), max_size=6))
def test_however_far_each_rank_has_come_the_newest_step_of_all_is_read(tmp_path_factory, turns):
    root, done = tmp_path_factory.mktemp("apart"), [0, 0]
    for rank in turns:
        done[rank] += 1
        add(root, done[rank], rank)
    result = latest(root)
    assert (result.step if result else 0) == min(done)


def test_of_two_ranks_that_find_all_parts_there_one_commits(tmp_path):
    drafts = [join_draft(tmp_path, 1, RUN) for _ in HALF]
    for rank, draft in enumerate(drafts):
        assert is_pending(draft)
        add_part(draft, (rank, 2), [whole_tensor(name, tensors(1)[name]) for name in HALF[rank]], {})
    assert [commit_if_complete(draft) for draft in drafts] == [tmp_path / "step-00000001", None]
    assert not any(map(is_pending, drafts))
    for draft in drafts:
        draft.release()


def test_a_part_of_a_run_that_died_is_not_put_together_with_one_of_the_next_run(tmp_path):
    add(tmp_path, 1, 0)
    add(tmp_path, 1, 1, run="fedc9876")
    assert recover_drafts(tmp_path) == []
    assert latest(tmp_path) is None


def test_older_checkpoints_stay_until_all_ranks_have_written_a_newer_one(tmp_path):
    save_step(tmp_path, 1)
    add(tmp_path, 2, 0, keep=1)
    assert holds_exactly(Checkpoint.open(tmp_path), 1)
    add(tmp_path, 2, 1, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def operations(tmp_path):
    """How many operations the last part takes, its commit among them."""
    add(tmp_path / "count", 2, 0)
    counter = FailingDisk()
    add(tmp_path / "count", 2, 1, files=counter)
    return len(counter.log)


@pytest.mark.long(quick=["power cut"])
@pytest.mark.parametrize("end", ["kill", "power cut"])
def test_whatever_operation_the_last_rank_stops_at_the_old_or_the_new_state_is_left_whole(tmp_path, end):
    seen = []
    for at in range(1, operations(tmp_path) + 1):
        root, files = tmp_path / f"stop-{at}", FailingDisk(at)
        save_step(root, 1)
        add(root, 2, 0)
        with pytest.raises(SimulatedCrash):
            add(root, 2, 1, files=files)
        if end == "power cut":
            files.drop_unsynced()
        recover_drafts(root)
        result = Checkpoint.open(root)
        assert holds_exactly(result, result.step), f"a mixture after a stop at operation {at}"
        seen.append(result.step)
        save_step(root, 3)
        assert not list(root.glob("*.tmp-*")), f"leftovers after a stop at operation {at}"
        shutil.rmtree(root)
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}


def test_a_new_run_keeps_what_a_dead_one_left_whole_and_clears_the_rest(tmp_path):
    for step in (1, 2):
        add(tmp_path, step, 0)
    with pytest.raises(SimulatedCrash):
        add(tmp_path, 1, 1, files=FailingDisk(operations(tmp_path / "other") - 3))
    cleanup_drafts(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "step-00000001"]


def test_a_draft_of_ranks_that_live_is_neither_rescued_nor_swept(tmp_path):
    add(tmp_path, 2, 0)
    alive = join_draft(tmp_path, 2, RUN)
    save_step(tmp_path, 1)
    assert recover_drafts(tmp_path) == []
    assert add(tmp_path, 2, 1) == tmp_path / "step-00000002"
    alive.release()


def test_a_part_that_was_damaged_is_named_and_no_checkpoint_is_made_of_it(tmp_path):
    add(tmp_path, 1, 0)
    next(tmp_path.glob("*/part-00000.json")).write_text("{")
    with pytest.raises(CheckpointError, match=r"part-00000.json is damaged: "):
        add(tmp_path, 1, 1)
    with pytest.warns(
        RuntimeWarning, match="step-00000001.tmp-0123abcd cannot be committed: .*part-00000.json is damaged"
    ):
        assert recover_drafts(tmp_path) == []


def test_a_state_that_is_not_json_is_named_before_anything_is_written(tmp_path):
    draft = join_draft(tmp_path, 1, RUN)
    with pytest.raises(CheckpointError, match="of a checkpoint is plain JSON:"):
        add_part(draft, (0, 2), [], {"epoch": tensors(1)})
    assert list(draft.folder.iterdir()) == []
    draft.discard()
