"""A chunk is read back as it was written, or an error names the file, the rank and the chunk."""

import errno
import os
from concurrent.futures import Future

import pytest

from counterpoint.errors import OffloadError
from counterpoint.runtime.offload import chunk_file
from counterpoint.runtime.offload.chunk_file import BLOCK_BYTES, ChunkFile, Span, allocate_aligned

SPANS = [Span(0, 0, 2 * BLOCK_BYTES), Span(1, 2 * BLOCK_BYTES, BLOCK_BYTES)]


@pytest.fixture(name="file")
def open_file(tmp_path):
    file = ChunkFile(tmp_path / "state", 3, 30.0)
    file.open(3 * BLOCK_BYTES)
    yield file
    file.close()


def aligned(span, value=0):
    return allocate_aligned(span.num_bytes).fill_(value)


def put(file, span, value):
    file.wait(file.start_write(span, aligned(span, value)), "writing")


def get(file, span):
    buffer = aligned(span)
    file.wait(file.start_read(span, buffer), "reading")
    return buffer


def test_chunks_are_read_back(file):
    for span, value in zip(SPANS, (7, 9), strict=True):
        put(file, span, value)
    assert [get(file, span).unique().tolist() for span in SPANS] == [[7], [9]]
    assert file.is_direct


def test_the_file_has_no_name_so_that_nothing_is_left_of_it(file):
    put(file, SPANS[0], 1)
    assert list(file.folder.iterdir()) == []


def test_its_space_is_reserved_before_anything_is_written(file):
    assert os.fstat(file.descriptor).st_blocks * 512 >= 3 * BLOCK_BYTES


def test_a_changed_byte_is_an_error_that_names_file_rank_and_chunk(file):
    put(file, SPANS[1], 5)
    damage(file, SPANS[1])
    with pytest.raises(
        OffloadError, match=r"offload file of rank 3 in .*state: chunk 1, 4096 bytes .* another checksum"
    ):
        get(file, SPANS[1])


def damage(file, span):
    """Write other bytes where a chunk is, with the checksum of the first ones."""
    known = file.checksums[span.index]
    put(file, span, 6)
    file.checksums[span.index] = known


def test_a_file_that_ends_early_is_an_error(file):
    put(file, SPANS[1], 5)
    os.ftruncate(file.descriptor, 0)
    with pytest.raises(OffloadError, match="chunk 1, 4096 bytes from byte 8192 on, cannot be read: the file ends"):
        get(file, SPANS[1])


def test_what_was_lost_once_is_an_error_in_later_steps(file):
    put(file, SPANS[1], 5)
    os.ftruncate(file.descriptor, 0)
    with pytest.raises(OffloadError):
        get(file, SPANS[1])
    with pytest.raises(
        OffloadError, match=r"^the optimizer state was lost in an earlier step; resume from a checkpoint"
    ):
        get(file, SPANS[0])


def test_a_disk_without_room_is_an_error_before_anything_is_written(tmp_path):
    with pytest.raises(OffloadError, match=r"rank 0 in .* needs 1000000000000000000 bytes .* but \d+ are free there"):
        ChunkFile(tmp_path, 0, 1.0).open(10**18)


@pytest.mark.parametrize(
    ("code", "remedy"),
    [(errno.EFBIG, "raise the limit of `ulimit -f`"), (errno.EDQUOT, "raise the quota of this user")],
)
def test_a_limit_below_what_is_free_is_named(code, remedy, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OffloadError, match=rf"but \d+ are free there \({os.strerror(code)}\); {remedy}, give another"):
        ChunkFile(tmp_path, 0, 1.0).open(BLOCK_BYTES)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(OffloadError, match=r"cannot be made: .*; give a folder on a local disk"):
        ChunkFile(tmp_path / "taken", 0, 1.0).open(BLOCK_BYTES)


def test_a_disk_that_hangs_is_an_error_after_the_timeout(tmp_path):
    file = ChunkFile(tmp_path, 2, 0.01)
    with pytest.raises(OffloadError, match=r"rank 2 in .*: reading chunk 5 has taken more than timeout_s=0.01 seconds"):
        file.wait(Future(), "reading chunk 5")


def test_a_system_without_direct_reads_and_writes_is_used_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT")
    file = ChunkFile(tmp_path, 0, 30.0)
    with pytest.warns(UserWarning, match="goes through the page cache"):
        file.open(BLOCK_BYTES)
    put(file, Span(0, 0, BLOCK_BYTES), 8)
    assert get(file, Span(0, 0, BLOCK_BYTES)).unique().tolist() == [8]
    file.close()


def test_the_descriptor_is_closed_after_what_is_running(file):
    descriptor, job = file.descriptor, file.start_write(SPANS[0], aligned(SPANS[0], 1))
    file.close()
    job.result(30.0)
    while file._file.num_users:
        os.sched_yield()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_folder_in_memory_is_used_with_a_warning(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nnone {tmp_path} tmpfs rw 0 0\n")
    assert chunk_file.find_file_system(tmp_path / "state", mounts) == "tmpfs"
    assert chunk_file.find_file_system(tmp_path.parent, mounts) == "ext4"
    assert not chunk_file.find_file_system(tmp_path, tmp_path / "missing")
    monkeypatch.setattr(chunk_file, "IN_MEMORY", {chunk_file.find_file_system(tmp_path)})
    with pytest.warns(UserWarning, match="is in memory, because the folder's file system is"):
        ChunkFile(tmp_path, 0, 30.0).open(BLOCK_BYTES)


def test_buffers_begin_where_direct_reads_can():
    assert {allocate_aligned(size).data_ptr() % BLOCK_BYTES for size in (1, 4096, 10_000)} == {0}
