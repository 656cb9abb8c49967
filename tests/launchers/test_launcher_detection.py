"""Every launcher's variables give the same rank; incomplete or inconsistent ones are rejected by name."""

import pytest

from counterpoint.errors import LaunchError
from counterpoint.launchers import RankEnvironment, detect
from counterpoint.launchers.environment import LAUNCHERS, derived_port, expand_hostlist, tasks_per_node
from counterpoint.launchers.variables import horovod_variables, kvstore_variables
from counterpoint.rpc.address import parse_address

TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "363003905", "PMIX_RANK": "1",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "6"}
SRUN = {
    "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n2",
}  # fmt: skip
SAGEMAKER = {"SM_HOSTS": '["algo-10", "algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-10", "TRAINING_JOB_NAME": "t7"}
KUBEFLOW = {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "t-node-0-0.t",
    "PET_MASTER_PORT": "29500",
}  # fmt: skip
VARIABLES = [
    (TORCHRUN, (1, 4, 1, 2, "10.0.0.1", 29500, "10.0.0.1:29500")),
    (OPEN_MPI, (1, 2, 1, 2, "127.0.0.1", derived_port("363003905"), "363003905")),
    (MPICH, (1, 2, 1, 2, "127.0.0.1", derived_port(""), f"127.0.0.1:{derived_port('')}")),
    (SRUN, (3, 4, 1, 2, "n1", derived_port("slurm-12.0"), "slurm-12.0")),
    (SAGEMAKER, (2, 3, 0, 1, "algo-1", derived_port("t7"), "t7")),
    (KUBEFLOW, (1, 2, 0, 1, "t-node-0-0.t", 29500, "trainjob")),
]
NAMES = [launcher.name for launcher in LAUNCHERS]


def test_every_launcher_of_the_table_is_here():
    at_work = [
        [launcher.name for launcher in LAUNCHERS if launcher.is_present(variables)] for variables, _ in VARIABLES
    ]
    assert at_work == [[name] for name in NAMES]


@pytest.mark.parametrize(("variables", "expected"), VARIABLES, ids=NAMES)
def test_what_a_launcher_sets_is_read(variables, expected):
    assert detect(variables) == RankEnvironment(*expected)


HALVES = [
    (variables, launcher, name)
    for (variables, _), launcher in zip(VARIABLES, LAUNCHERS, strict=True)
    for name in launcher.required_variables
    if {name} != set(launcher.marker_variables)  # of a lone sign nothing is left
]


@pytest.mark.parametrize(("variables", "launcher", "name"), HALVES, ids=[name for _, _, name in HALVES])
def test_half_of_it_is_refused_with_what_is_missing(variables, launcher, name):
    with pytest.raises(LaunchError, match=f"but {name} is not set; a rank needs all of") as caught:
        detect({key: value for key, value in variables.items() if key != name})
    rest = [other for other in launcher.required_variables if other != name]
    assert all(f"{other}={variables[other]}" in str(caught.value) for other in rest)


WRONG = [
    (OPEN_MPI, {"OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK must be below OMPI_COMM_WORLD_SIZE; start the"),
    (OPEN_MPI, {"OMPI_COMM_WORLD_SIZE": "4"}, "4 ranks on several hosts, but MASTER_ADDR is not set, so"),
    (SRUN, {"SLURM_PROCID": "x"}, "SLURM_PROCID='x' is not a number from 0; start the script with srun"),
    (SRUN, {"SLURMD_NODENAME": "n3"}, r"this is n3, SLURM_NODEID=1, but SLURM_STEP_NODELIST=n\[1-2\] has 2 nodes"),
    (SRUN, {"SLURM_STEP_NODELIST": "n[2-1]"}, r"\[2-1\] in the host list 'n\[2-1\]' is not a range"),
    (SRUN, {"SLURM_STEP_NODELIST": "n[1"}, r"'n\[1' is not a host list"),
    (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "two"}, "'two' is not a list of tasks per node"),
    (SAGEMAKER, {"SM_CURRENT_HOST": "algo-7"}, "SM_CURRENT_HOST=algo-7 is not one of SM_HOSTS="),
    (SAGEMAKER, {"SM_HOSTS": "algo-1"}, "SM_HOSTS='algo-1' is not a list of host names"),
    (KUBEFLOW, {"PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE=auto, and this is the only process of its"),
]  # fmt: skip


@pytest.mark.parametrize(("variables", "change", "text"), WRONG)
def test_what_does_not_fit_is_refused_with_the_values(variables, change, text):
    with pytest.raises(LaunchError, match=text):
        detect({**variables, **change})


ALONE = [
    {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
     "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
    {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
     "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "n1", "SLURMD_NODENAME": "n1"},
    {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
    {key: value for key, value in SRUN.items() if key != "SLURM_STEP_ID"},
]  # fmt: skip


@pytest.mark.parametrize("variables", ALONE, ids=["mpirun -n 1", "srun --pty", "one host", "a batch script"])
def test_a_single_process_or_a_launcher_is_not_a_rank(variables):
    assert detect(variables) is None


def test_a_user_says_where_ranks_meet_whose_launcher_does_not():
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "4000"}
    result = detect(several)
    assert result is not None
    assert (result.master_addr, result.master_port, result.world_size) == ("a", 4000, 4)


def test_torchrun_inside_of_srun_is_torchrun():
    result = detect({**SRUN, **TORCHRUN, "TORCHELASTIC_RUN_ID": "t"})
    assert result is not None
    assert (result.rank, result.job) == (1, "t")


@pytest.mark.parametrize("outer", [OPEN_MPI, SRUN], ids=["mpirun", "srun"])
def test_ranks_that_somebody_has_set_for_all_tasks_alike_contradict_the_launcher(outer):
    by_hand = {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with pytest.raises(
        LaunchError, match=r"two launchers contradict each other: RANK=0, .* say rank 0 of 4, .*run says"
    ):
        detect({**outer, **by_hand})


def test_ranks_that_a_script_has_copied_from_srun_are_taken():
    result = detect({**SRUN, **TORCHRUN, "RANK": "3"})
    assert result is not None
    assert (result.rank, result.master_addr) == (3, "10.0.0.1")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("a,b2", ["a", "b2"]),
        ("gpu[08-10,3]-ib,x", ["gpu08-ib", "gpu09-ib", "gpu10-ib", "gpu3-ib", "x"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_a_list_of_hosts_is_unfolded(text, names):
    assert expand_hostlist(text) == names


def test_tasks_of_nodes_are_unfolded():
    assert tasks_per_node("2(x3),1,4(x1)") == [2, 2, 2, 1, 4]


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (expand_hostlist, f"gpu[1-{'9' * 5000}]", "a number of a host list has 5000 digits; give at most 20"),
        (expand_hostlist, "gpu[1-999999999]", "has 999999999 nodes; a list of nodes has at most 100000"),
        (expand_hostlist, "gpu[1-90000,1-90000]", "has 180000 nodes; a list of nodes has at most 100000"),
        (expand_hostlist, "gpu[1-2]" * 40, "has 1099511627776 nodes; a list of nodes has at most 100000"),
        (expand_hostlist, "gpu[\N{SUPERSCRIPT TWO}]", "is not a range, such as"),
        (tasks_per_node, "9" * 5000, "a number of tasks has 5000 digits; give at most 20"),
        (tasks_per_node, "2(x999999999)", "has 999999999 nodes; a list of nodes has at most 100000"),
        (kvstore_variables, {"DMLC_NUM_SERVER": "9" * 5000}, "DMLC_NUM_SERVER has 5000 digits; give at most 20"),
        (
            horovod_variables,
            {"HOROVOD_FUSION_THRESHOLD": "9" * 5000},
            "HOROVOD_FUSION_THRESHOLD has 5000 digits; give at most 20",
        ),
        (parse_address, f"tcp:host:{'9' * 5000}", "is not an address; write unix:NAME or tcp:HOST:PORT"),
    ],
)
def test_a_number_that_is_too_large_is_refused(parse, text, message):
    with pytest.raises(LaunchError, match=message):
        parse(text)
