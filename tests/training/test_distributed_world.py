"""Ranks in processes meet, or end at once."""

import socket
import time

import pytest

from counterpoint.errors import PeerError
from counterpoint.launchers.environment import ERROR_FILE, EXITED_FILE, RankEnvironment
from counterpoint.training.distributed_world import open_world


def test_a_rank_does_not_wait_for_one_that_has_ended_before_it_connected(tmp_path, monkeypatch):
    """It waited until the timeout, though the launcher had seen the end."""
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "rank-0.json"))
    (tmp_path / EXITED_FILE).touch()
    store = socket.create_server(("127.0.0.1", 0))
    port = store.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(PeerError, match="for rank 1 of 2"):
        open_world(RankEnvironment(0, 2, 0, 2, "127.0.0.1", port, "gone", 40.0, store.detach()), 2, 40.0)
    assert time.monotonic() - began < 20
