"""A shard alone: what it answers, and what changes nothing."""

import re

import pytest
import torch
from msgspec.structs import replace

from counterpoint.errors import ProtocolError
from counterpoint.ps.consistency import Asp, Bsp, Ssp
from counterpoint.ps.job_config import DataConfig, JobConfig
from counterpoint.ps.messages import (
    Ack,
    InitRequest,
    JobMember,
    JoinClock,
    KeyProgress,
    KeySpec,
    PullRequest,
    PushReply,
    PushRequest,
    Rejected,
    RequestHeader,
    SetMembers,
)
from counterpoint.ps.shard import PsShard, replay_journal
from counterpoint.ps.update_rules import Assign, Sgd

MEMBERS = SetMembers(1, (JobMember("worker", 1),))


def origin(sequence, incarnation=1):
    return RequestHeader("worker", incarnation, 1, sequence)


def init(sequence=0, *, rule=None, size=2):
    spec = KeySpec("weight", "float64", 0, size, 0, rule or Sgd(1.0))
    return InitRequest(origin(sequence), 0, spec, torch.zeros(size, dtype=torch.float64))


def push(sequence, *, key="weight", slice_index=-1, values=(1.0, 2.0), dtype=torch.float64):
    return PushRequest(origin(sequence), 0, key, slice_index, 0, torch.tensor(values, dtype=dtype))


def shard(consistency=None, **more):
    return replay_journal(JobConfig("job", consistency or Asp(), **more), 0, [MEMBERS, init()])


def coded(code, written):
    return PushRequest(origin(1), 0, "weight", -1, 0, torch.tensor(written, dtype=torch.uint8), None, code)


WRONG = {
    "too few bytes": (coded("int8", [1, 2]), "2 bytes of int8 pushed to weight, expected 10"),
    "a place that is not there": (
        coded("topk:0.5", [9, 0, 0, 0, *[0] * 8]),
        "bytes pushed to weight that are not a valid topk:0.5",
    ),
    "an unknown key": (push(1, key="wieght"), "unknown key 'wieght'"),
    "a wrong shape": (push(1, values=(1.0,)), r"\(1,\) pushed to weight, which is \(2,\)"),
    "a wrong dtype": (push(1, dtype=torch.float32), "float32 pushed to weight, which is float64"),
    "not a number": (push(1, values=(1.0, torch.nan)), "not finite"),
    "another key of that name": (init(1, size=3), "weight exists as KeySpec"),
    "no optimizer": (init(1, rule=Assign()), "weight exists as KeySpec"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_request_changes_no_value(name):
    entry, result = WRONG[name]
    one = shard()
    before = one.keys["weight"].storage.read(None).clone(), one.state.keys[0].progress
    answer = one.apply(entry)
    assert isinstance(answer, Rejected)
    assert answer.reason == "request"
    assert re.search(result, answer.text)
    assert torch.equal(one.keys["weight"].storage.read(None), before[0])
    assert one.state.keys[0].progress == before[1]


def test_a_push_in_a_code_counts_what_its_bytes_say():
    one = shard()
    one.apply(coded("twobit:0.5", [0b1001]))
    assert one.keys["weight"].storage.read(None).tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("code", ["zip", "powersgd", "adasum", "topk:0", "x" * 999])
def test_a_code_that_no_push_has_is_no_message(code):
    with pytest.raises(ProtocolError, match="with codec"):
        coded(code, [0])


def test_asynchronous_keys_need_an_optimizer_on_the_server():
    one = replay_journal(JobConfig("job", Asp()), 0, [MEMBERS])
    answer = one.apply(init(rule=Assign()))
    assert isinstance(answer, Rejected)
    assert "without an optimizer, which asp needs" in answer.text


def test_a_server_that_is_full_reports_it_and_keeps_what_it_has():
    one = shard(capacity_bytes=20)
    spec = KeySpec("more", "float64", 0, 2, 0, Sgd(1.0))
    answer = one.apply(InitRequest(origin(1), 0, spec, torch.zeros(2, dtype=torch.float64)))
    assert isinstance(answer, Rejected)
    assert (answer.reason, list(one.keys)) == ("full", ["weight"])
    assert "holds 16 of at most 20 bytes" in answer.text


def test_an_incarnation_outside_the_job_is_ignored():
    answer = shard().apply(
        PushRequest(origin(0, incarnation=2), 0, "weight", -1, 0, torch.ones(2, dtype=torch.float64))
    )
    assert isinstance(answer, Rejected)
    assert answer.reason == "identity"


def test_a_key_is_made_once():
    one = shard()
    assert one.apply(init(1)) == Ack(0, 1)
    assert one.apply(push(2)) == PushReply(0, 2, 1)


def test_the_sum_of_a_step_is_what_workers_that_update_by_themselves_pull():
    one = replay_journal(JobConfig("job", Bsp(2)), 0, [MEMBERS, init(rule=Assign())])
    one.apply(push(1, slice_index=1))
    one.apply(push(2, slice_index=0))
    pull = PullRequest(origin(3), 0, "weight", 7, 1)
    assert one.can_read(pull)
    assert one.read(pull).values.tolist() == [2.0, 4.0]


def test_a_pull_sees_what_its_worker_pushed_before():
    assert not shard().can_read(PullRequest(origin(2), 0, "weight", 0))


def test_a_state_makes_the_same_shard():
    one = shard(Bsp(2), data=DataConfig(4, 1, 1, 2))
    one.apply(push(1, slice_index=1))
    again = PsShard(one.job, 0, one.state)
    for each in (one, again):
        each.apply(push(2, slice_index=0))
    assert again.digest() == one.digest()
    assert again.keys["weight"].tracker.version == 1


def test_a_shard_that_is_made_of_a_state_still_has_the_weights_of_the_step_before():
    one = shard(Bsp(1), data=DataConfig(4, 1, 1, 1))
    one.apply(push(1, slice_index=0))
    again = PsShard(one.job, 0, one.state)
    exact, newest = (
        again.read(PullRequest(origin(2), 0, "weight", 0, 0, exact_version=is_exact)) for is_exact in (True, False)
    )
    assert (exact.version, exact.values.tolist()) == (0, [0.0, 0.0])
    assert (newest.version, newest.values.tolist()) == (1, [-1.0, -2.0])


@pytest.mark.parametrize("fast", ["first", "second"])
def test_the_slowest_clock_stays_when_all_workers_are_gone_at_once(fast):
    """They went one by one in the order of a set, another one in every process, and so did what was left: seed 5351."""
    one = replay_journal(JobConfig("job", Ssp(1)), 0, [SetMembers(1, (JobMember("first", 1), JobMember("second", 2)))])
    headers = {"first": RequestHeader("first", 1, 1), "second": RequestHeader("second", 2, 1)}
    one.apply(replace(init(), header=headers["first"]))
    for header in headers.values():
        one.apply(JoinClock(replace(header, sequence=int(header.member == "first")), 0))
    one.apply(replace(push(0), header=replace(headers[fast], sequence=one.clients[fast].next_sequence)))
    one.apply(SetMembers(2, ()))
    assert one.state.keys[0].progress == KeyProgress(1, min_clocks=(0, 0))
