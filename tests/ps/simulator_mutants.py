"""Bugs that have been made elsewhere, planted one at a time: a checker that finds none of them proves nothing."""

from msgspec.structs import replace

from counterpoint.ps.actions import COORDINATOR, SendMessage
from counterpoint.ps.consistency import ConsistencyTracker
from counterpoint.ps.coordinator import Coordinator
from counterpoint.ps.coordinator_state import CoordinatorState, TaskQueue
from counterpoint.ps.messages import BackupReady, InstallSnapshot, ShardReplicas
from counterpoint.ps.replication import BackupReplica, PrimaryReplica
from counterpoint.ps.server import ServerNode
from counterpoint.ps.shard import PsShard
from counterpoint.testing.ps_simulator.cluster import SimulatedDisk


def answers_before_the_backup_has_it(monkeypatch):
    append = PrimaryReplica.append

    def hasty(self, origin, entry, now):
        yield from append(self, origin, entry, now)
        while self.pending and self.replicas.is_backup_ready:
            yield from self.apply(self.pending.popleft())

    monkeypatch.setattr(PrimaryReplica, "append", hasty)


def computes_a_slice_from_two_steps(monkeypatch):
    read = PsShard.read
    monkeypatch.setattr(PsShard, "read", lambda self, pull: read(self, replace(pull, exact_version=False)))


def counts_a_slice_again(monkeypatch):
    monkeypatch.setattr(ConsistencyTracker, "is_duplicate", lambda self, slice_index: False)
    monkeypatch.setattr("counterpoint.ps.consistency.IntervalSet.add", lambda self, number: None)


def sends_before_it_writes(monkeypatch):
    on_event = Coordinator.on_event

    def eager(self, message, now):
        return sorted(on_event(self, message, now), key=lambda action: not isinstance(action, SendMessage))

    monkeypatch.setattr(Coordinator, "on_event", eager)


def drops_a_task_that_fails_three_times(monkeypatch):
    give_back = TaskQueue._requeue

    def forgetful(self, task, outcome, text):
        give_back(self, task, outcome, text)
        if self.todo[0].attempt >= 3:
            self.todo.popleft()

    monkeypatch.setattr(TaskQueue, "_requeue", forgetful)


def drops_the_tasks_of_the_dead(monkeypatch):
    def forgetful(self, worker):
        self.doing = {place: one for place, one in self.doing.items() if one[1] != worker}

    monkeypatch.setattr(TaskQueue, "reclaim", forgetful)


def calls_a_backup_complete_that_has_nothing(monkeypatch):
    lead = ServerNode._become_primary

    def hasty(self, index, replicas, now):
        yield from lead(self, index, replicas, now)
        if replicas.backup and not replicas.is_backup_ready:
            yield SendMessage(COORDINATOR, BackupReady(self.membership.header(), index))

    monkeypatch.setattr(ServerNode, "_become_primary", hasty)


def keeps_entries_in_the_order_they_come(monkeypatch):
    keep = BackupReplica.apply_replication

    def careless(self, job, message):
        if (
            not isinstance(message, InstallSnapshot)
            and self.shard is not None
            and message.position > self.shard.position
        ):
            message = replace(message, position=self.shard.position)
        yield from keep(self, job, message)

    monkeypatch.setattr(BackupReplica, "apply_replication", careless)


def reads_without_regard_to_clocks(monkeypatch):
    monkeypatch.setattr(ConsistencyTracker, "can_read", lambda self, worker, least: self.version >= least)


def waits_for_those_who_rest(monkeypatch):
    monkeypatch.setattr(ConsistencyTracker, "leave_clock", lambda self, workers: None)


def updates_before_the_step_is_whole(monkeypatch):
    lacks = ConsistencyTracker.num_missing
    monkeypatch.setattr(ConsistencyTracker, "num_missing", lambda self: max(0, lacks(self) - 1))


def cuts_without_draining(monkeypatch):
    monkeypatch.setattr(TaskQueue, "is_quiesced", True)


def goes_on_behind_a_torn_line(monkeypatch):
    monkeypatch.setattr(SimulatedDisk, "truncate", lambda self, log, num_bytes: None)


def promotes_an_empty_backup(monkeypatch):
    lead = ServerNode._become_primary

    def forgetful(self, index, replicas, now):
        if isinstance(self.shard_replicas.get(index), BackupReplica):
            self.shard_replicas.pop(index)
        yield from lead(self, index, replicas, now)

    monkeypatch.setattr(ServerNode, "_become_primary", forgetful)


def installs_without_the_state_of_the_rule(monkeypatch):
    again = PrimaryReplica.retransmit

    def forgotten(message):
        keys = tuple(replace(k, tensors=(k.tensors[0], *(p * 0 for p in k.tensors[1:]))) for k in message.state.keys)
        return replace(message, state=replace(message.state, keys=keys))

    def careless(self, origin, now):
        for action in again(self, origin, now):
            if isinstance(action, SendMessage) and isinstance(action.message, InstallSnapshot):
                yield SendMessage(action.to, forgotten(action.message))
            else:
                yield action

    monkeypatch.setattr(PrimaryReplica, "retransmit", careless)


def gives_a_new_life_an_old_number(monkeypatch):
    join = CoordinatorState._join

    def confused(self, line):
        join(self, replace(line, incarnation=1 + sum(map(ord, line.name))))
        self.incarnation = 0

    monkeypatch.setattr(CoordinatorState, "_join", confused)


def gives_up_the_last_copy(monkeypatch):
    def rash(self, name):
        return self.job.num_servers > 1 and any(
            name == one.primary and not one.is_backup_ready for one in self.replicas
        )

    def forgetful(replicas, live_servers):
        if replicas.backup and replicas.backup not in live_servers:
            backup = min((name for name in live_servers if name != replicas.primary), default="")
            return ShardReplicas(replicas.primary, backup)
        return replicas

    monkeypatch.setattr(CoordinatorState, "may_hold_last_copy", rash)
    monkeypatch.setattr("counterpoint.ps.coordinator.assign_replicas", forgetful)


def answers_whoever_asks(monkeypatch):
    """Neither primaries nor backups look at the generation."""
    request, keep, kept = ServerNode._on_request, ServerNode._on_replicate, ServerNode._on_replication_ack

    def as_of_now(self, message):
        return replace(message, header=replace(message.header, generation=self.generation))

    monkeypatch.setattr(
        ServerNode, "_on_request", lambda self, message, now: request(self, as_of_now(self, message), now)
    )
    monkeypatch.setattr(ServerNode, "_on_replicate", lambda self, message: keep(self, as_of_now(self, message)))
    monkeypatch.setattr(
        ServerNode, "_on_replication_ack", lambda self, message, now: kept(self, as_of_now(self, message), now)
    )


MUTANTS = {
    answers_before_the_backup_has_it: 3,
    answers_whoever_asks: 2,
    calls_a_backup_complete_that_has_nothing: 20,
    computes_a_slice_from_two_steps: 31,
    counts_a_slice_again: 0,
    cuts_without_draining: 20,
    drops_a_task_that_fails_three_times: 103,
    drops_the_tasks_of_the_dead: 3,
    gives_a_new_life_an_old_number: 7,
    gives_up_the_last_copy: 3,
    goes_on_behind_a_torn_line: 0,
    installs_without_the_state_of_the_rule: 3,
    keeps_entries_in_the_order_they_come: 0,
    promotes_an_empty_backup: 3,
    reads_without_regard_to_clocks: 10,
    sends_before_it_writes: 13,
    updates_before_the_step_is_whole: 0,
    waits_for_those_who_rest: 47,
}
"""Each with the first seed that finds it, so that an ordinary test need not try all before."""
