"""Random programs give the same results on every transport as in one process."""

import pytest

from tests.fabric.conftest import SHARED
from tests.fabric.random_programs import RandomProgram, differing
from tests.fabric.run_ranks import on_local, on_shm


def run(run_scenario, seeds):
    for seed in seeds:
        num_ranks = 2 + seed % 4
        program = RandomProgram(seed, num_ranks)
        expected, result = on_local(program, num_ranks), run_scenario(program, num_ranks)
        assert all(isinstance(one, dict) for one in result), (
            seed,
            [one for one in result if not isinstance(one, dict)],
        )
        for mine, theirs in zip(result, expected, strict=True):
            wrong = differing(mine, theirs, is_exact=run_scenario is on_shm)  # others add up in another order
            assert not wrong, (seed, [vars(step) for step in program.steps if step.index in wrong])


@pytest.mark.process
@SHARED[1]
def test_random_programs_end_as_in_one_process():
    """A notice in shared memory was overwritten that a member had yet to read: ranks crashed, or seemed to disagree."""
    run(on_shm, (1, 2))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_random_programs_end_as_in_one_process(processes):
    run(processes, range(100, 300))
