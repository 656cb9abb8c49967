"""A shard is saved while its server goes on: on a disk that takes long, and by a server that dies at any moment."""

import os
from contextlib import contextmanager

import pytest
import torch

from counterpoint.errors import CheckpointError
from counterpoint.server.actions import COORDINATOR, Save, Send, Write
from counterpoint.server.calls import Heartbeat, Saved
from counterpoint.server.choices import Sgd
from counterpoint.server.hosting.folder import log_path, part_path, recovered_shard
from counterpoint.server.hosting.host import Host
from counterpoint.server.hosting.writer import Writer
from counterpoint.server.job import Asp, Job
from counterpoint.server.log import record
from counterpoint.server.messages import Member, Members, Origin, Spec
from counterpoint.server.shard import Shard
from counterpoint.server.states import Counts, KeyState, ShardState
from counterpoint.server.wire.greeting import Secret
from counterpoint.server.wire.loop import Loop
from counterpoint.server.wire.place import parse_place
from tests.server.hosting.conftest import PATIENCE, until

ORIGIN = Origin("server-0", 1, 1)
LARGE = 1_200_000
WEIGHT = Spec("weight", "float32", 0, LARGE, 0, Sgd(1.0))


def job(num_servers=1):
    return Job("saved", Asp(), num_servers, patience=PATIENCE)


def members(number):
    return Members(number, (Member("worker-0", number),))


class Ear:
    """A machine that remembers what it is told."""

    def __init__(self):
        self.heard = []

    def on_event(self, message, now):
        self.heard += [] if message is None else [message]
        return []


@contextmanager
def slow_disk(part):
    """The part of a cut is being written, and is not complete before the block is left; then its disk fails."""
    part.parent.mkdir(parents=True, exist_ok=True)
    pipe = part.with_name(f".{part.name}.{os.getpid()}")
    os.mkfifo(pipe)

    def begun():
        began.append(os.open(pipe, os.O_RDONLY))

    began: list[int] = []
    yield begun
    os.close(began.pop())


def test_a_server_gives_signs_of_life_while_a_shard_is_being_saved(tmp_path):
    """It was taken for dead: what it sent waited until a large shard was on the disk."""
    place, ear = parse_place(f"unix:test-{os.getpid()}-ear"), Ear()
    state = ShardState(0, 0, keys=(KeyState(WEIGHT, Counts(0), (torch.zeros(LARGE),)),))
    with Loop() as loop:
        hosts = Host(job(), loop, Secret(None, "saved")), Host(job(), loop, Secret(None, "saved"), place, tmp_path)
        hosts[0].post.listen(place)
        for host, machine in zip(hosts, (ear, Ear()), strict=True):
            host.run(machine)  # type: ignore[arg-type]  # all that a host asks of it is on_event
        with slow_disk(part_path(tmp_path, 0, 0)) as begun:
            told = Saved(ORIGIN, 0, 0, 0), Heartbeat(ORIGIN)
            hosts[1].act([Save(0, 0, state), *(Send(COORDINATOR, message) for message in told)])
            begun()
            loop.wait_for(lambda: len(ear.heard) > 0, 20.0, "a sign of life")
            assert ear.heard == [Heartbeat(ORIGIN)]
        for host in hosts:
            host.close()


def test_what_is_pushed_while_shards_are_being_saved_is_answered(threads, tmp_path):
    servers = threads(job(2), tmp_path)
    with servers.join("worker-0") as session, slow_disk(part_path(tmp_path, 0, 0)) as begun:
        session.init("weight", torch.zeros(LARGE), Sgd(1.0))
        session.checkpoint()
        begun()
        assert session.push("weight", torch.ones(LARGE)).wait(20.0).versions == (1, 1)
        assert float(session.pull("weight").wait(20.0).values.sum()) == -LARGE
    until(lambda: servers.failures)
    assert "cannot write" in str(servers.failures.pop())


def test_a_server_that_dies_after_a_save_may_save_the_same_cut_again(tmp_path):
    """Its log then had the same name twice, and the second time was deleted with what was counted since."""
    shard = Shard(job(), 0)
    for first in (1, 3):
        writer = Writer(tmp_path, lambda _: None, lambda _: None)
        for number in (first, first + 1):
            shard.apply(members(number))
            writer.order(Write("shard-0", members(number)))
            if number == first:
                writer.order(Save(0, 0, shard.state))
        writer.close()
    state, lines = recovered_shard(tmp_path, 0)
    assert state is not None
    assert (state.position, lines) == (3, [members(4)])


def test_a_server_that_died_before_its_shard_was_saved_goes_on_from_the_log_before(tmp_path):
    log_path(tmp_path, "shard-0").write_bytes(record(members(1)))
    log_path(tmp_path, "shard-0", (0, 1)).touch()
    assert recovered_shard(tmp_path, 0) == (None, [members(1)])
    assert not log_path(tmp_path, "shard-0", (0, 1)).exists()


def test_a_log_without_the_shard_that_it_goes_on_from_is_no_log(tmp_path):
    log_path(tmp_path, "shard-0", (0, 1)).write_bytes(record(members(2)))
    with pytest.raises(CheckpointError, match=r"goes on after 1 entries, but .* is not the shard that they made"):
        recovered_shard(tmp_path, 0)
