"""The disk reads and writes while a rank computes; what uses a tensor waits until it is read."""

import pytest

from counterpoint.program.instruction import Fetch, Offload
from counterpoint.program.text import parse_program
from counterpoint.simulator.instruction_times import time_instructions
from counterpoint.simulator.simulate import simulate
from tests.simulator.programs import FakeCosts

STEP = "F0.0 F1.0 offload(x1.0)>disk F2.0 fetch(x1.0)<disk B2.0 R1.0 B1.0 R0.0 B0.0 commit@0 U0 U1 U2"
"""Five ticks up to the recomputation of block 1, which reads its input, if the disk is fast; and seven more."""


class DiskCosts(FakeCosts):
    """One tick for each computation, and the given ticks for what the disk reads or writes."""

    def __init__(self, disk_s):
        super().__init__(link_s=0.0)
        self.disk_s = disk_s

    def offload_s(self, instruction, fraction):
        assert isinstance(instruction, Fetch | Offload)
        return self.disk_s


def step_s(disk_s, text=STEP):
    return simulate(parse_program(text), DiskCosts(disk_s)).step_s


@pytest.mark.parametrize("disk_s", [0.0, 0.5, 1.0])
def test_a_disk_that_is_fast_enough_costs_nothing(disk_s):
    """The input is written during F2.0, and read during B2.0."""
    assert step_s(disk_s) == step_s(0.0)


def test_a_recomputation_waits_until_its_input_is_written_and_read():
    assert step_s(3.0) == step_s(0.0) + 2 * 3.0 - 2


def test_the_next_input_is_written_when_the_one_before_is():
    text = "F0.0 F1.0 offload(x1.0)>disk F2.0 offload(x2.0)>disk F3.0"
    events = simulate(parse_program(text), DiskCosts(5.0)).events
    assert [(one.start_s, one.stop_s) for one in events if one.lane == "link"] == [(2.0, 7.0), (7.0, 12.0)]
    assert [(one.start_s, one.stop_s) for one in events if one.text == "F3.0"] == [(7.0, 8.0)]


def test_gathers_and_updates_wait_for_the_shards_of_weights_that_they_use():
    text = "fetch(weight0)<disk F1.0 all_gather(weight0)@0 F0.0 fetch(weight0)<disk F1.1 U0 offload(weight0)>disk F1.2"
    starts = {
        one.text: one.start_s for one in simulate(parse_program(text), DiskCosts(4.0)).events if one.lane == "compute"
    }
    assert starts == {"F1.0": 0.0, "F0.0": 4.0, "F1.1": 5.0, "U0": 9.0, "F1.2": 14.0}


def test_the_lower_bound_of_a_step_has_that_of_its_disk():
    (instructions,) = parse_program(STEP).unroll(1)
    bounds = [time_instructions(instructions, DiskCosts(disk_s)).lower_bound_s for disk_s in (0.0, 1.0, 50.0)]
    assert bounds[0] == bounds[1] == step_s(0.0)
    assert bounds[2] == 100.0 <= step_s(50.0)
