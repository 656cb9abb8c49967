"""torchrun's environment variables, parsed and validated."""

import pytest

from counterpoint.errors import LaunchError
from counterpoint.launchers import RankEnvironment, detect
from counterpoint.launchers.environment import rank_variables

WHOLE = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_no_launcher_is_no_rank():
    assert detect({}) is None
    assert detect({"MASTER_ADDR": "10.0.0.1", "PATH": "/bin"}) is None


def test_what_torchrun_sets_is_read():
    result = detect({**WHOLE, "TORCHELASTIC_RUN_ID": "job-7"})
    assert result == RankEnvironment(1, 4, 1, 2, "10.0.0.1", 29500, "job-7")
    assert detect(WHOLE) == RankEnvironment(1, 4, 1, 2, "10.0.0.1", 29500, "10.0.0.1:29500")


@pytest.mark.parametrize(("store_fd", "timeout_s"), [(None, None), (5, 12.5)])
def test_what_the_supervisor_sets_is_what_a_rank_finds(store_fd, timeout_s):
    environment = RankEnvironment(0, 3, 0, 3, "127.0.0.1", 4000, "job", timeout_s, store_fd)
    assert detect(rank_variables(environment)) == environment


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_a_partial_environment_is_refused_with_what_is_missing(name):
    partial = {key: value for key, value in WHOLE.items() if key != name}
    with pytest.raises(LaunchError, match=f"but {name} is not set; a rank needs all of RANK, WORLD_SIZE") as caught:
        detect(partial)
    assert all(f"{key}={value}" in str(caught.value) for key, value in partial.items())


@pytest.mark.parametrize(
    ("change", "local_world_size"),
    [
        ({"LOCAL_SIZE": "2"}, 2),  # as DeepSpeed's launcher sets it
        ({"MASTER_ADDR": "127.0.0.1"}, 4),
        ({"MASTER_ADDR": "localhost"}, 4),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, 1),
    ],
)
def test_the_number_of_ranks_on_a_host_follows_from_other_variables(change, local_world_size):
    variables = {**WHOLE, **change}
    del variables["LOCAL_WORLD_SIZE"]
    found = detect(variables)
    assert found is not None
    assert found.local_world_size == local_world_size


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"RANK": "4"}, "RANK=4, WORLD_SIZE=4, .* contradict each other: RANK must be below WORLD_SIZE"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK must be below LOCAL_WORLD_SIZE; LOCAL_RANK cannot exceed RANK"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE cannot exceed WORLD_SIZE"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT must be between 1 and 65535"),
        ({"RANK": "-1"}, "RANK='-1' is not a number from 0; start the script with `counterpoint run"),
        ({"RANK": "9" * 5000}, "^the number RANK has 5000 digits; give at most 20$"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a number"),
        ({"COUNTERPOINT_TIMEOUT_S": "soon"}, "COUNTERPOINT_TIMEOUT_S='soon' is not a number of seconds above 0"),
        ({"COUNTERPOINT_DEADLINE_S": "3"}, "COUNTERPOINT_DEADLINE_S is now called COUNTERPOINT_TIMEOUT_S"),
    ],
)
def test_a_contradiction_is_refused_with_the_values(change, text):
    with pytest.raises(LaunchError, match=text):
        detect({**WHOLE, **change})
