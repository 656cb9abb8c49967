import os
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from counterpoint.cli import doctor
from counterpoint.cli.main import build_app
from counterpoint.device.cuda import take_inventory
from counterpoint.device.inventory import DeviceInventory, GpuInfo, PciLanes, read_driver, read_lanes
from counterpoint.launchers.machine import processor_flags
from counterpoint.launchers.variables import allocator_variables, requested_threads, visibility_variables
from counterpoint.profiler.torch_build import NEEDED_FLAGS, find_speed_costs, read_torch_build
from counterpoint.runtime.malloc import heap_of_process


def run(*words):
    return CliRunner().invoke(build_app(words), list(words))


def test_a_machine_that_can_train_gets_a_list_and_no_error():
    seen = run("doctor", "-n", "1")
    assert seen.exit_code == 0
    assert "nothing is broken" in seen.output
    assert "torch" in seen.output


def test_more_ranks_than_cores_hurt_and_the_fix_is_said():
    (finding,) = doctor.check_cores(10_000)
    assert finding.grade == "hurts"
    assert "10000 ranks x" in finding.fact
    assert finding.fix


def test_what_is_broken_ends_with_1(monkeypatch):
    broken = doctor.Finding("gloo", "broken", "this torch has no gloo", "install another")
    monkeypatch.setattr(doctor, "CHECKS", (lambda _ranks: iter([broken]),))
    seen = run("doctor")
    assert seen.exit_code == 1
    assert "broken: gloo" in seen.output


@pytest.mark.parametrize(("text", "threads"), [("3", 3), ("0", None), ("many", None), ("", None), ("9" * 5000, None)])
def test_only_a_positive_number_of_threads_is_a_wish(text, threads):
    assert requested_threads({"OMP_NUM_THREADS": text}) == threads


def test_the_cores_and_where_ranks_would_be_on_them_are_shown():
    topology, core, numa = doctor.check_topology(1)
    assert topology.fact.endswith("package") or "packages" in topology.fact or "quota" in topology.fact
    assert core.fact.startswith("none by default; with --bind core: rank 0 on ")
    assert numa.fact.startswith("none by default; with --bind numa: rank 0 on ")


@pytest.mark.skipif(heap_of_process() is None, reason="the C library is not glibc")
def test_what_training_changes_in_the_allocator_is_said_and_how_to_leave_it(monkeypatch):
    (finding,) = doctor.check_allocator(1)
    assert "M_MMAP_MAX=0, M_TRIM_THRESHOLD=-1" in finding.fact
    assert "retain_freed_memory=False" in finding.fix
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "65536")
    (finding,) = doctor.check_allocator(1)
    assert finding.fact == "set up by MALLOC_MMAP_MAX_: training leaves it unchanged"


def test_tunables_count_as_an_allocator_that_is_set_up_only_if_they_are_about_it():
    assert allocator_variables({"GLIBC_TUNABLES": "glibc.malloc.mmap_max=0"}) == ["GLIBC_TUNABLES"]
    assert not allocator_variables({"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F"})


def test_what_torch_is_built_with_is_shown_with_what_costs_speed():
    build = replace(read_torch_build(), is_debug=True)
    first, *rest = doctor.judge_build(build)
    assert (first.grade, first.subject, first.fact) == ("good", "built with", str(build))
    assert [(finding.grade, finding.subject) for finding in rest] == [
        (cost.grade, cost.subject) for cost in find_speed_costs(build)
    ]
    assert rest[0].fact == "torch is a debug build: it is compiled without optimization"
    assert rest[0].fix == "install a release build"


@pytest.mark.long
@pytest.mark.process
@pytest.mark.skipif(not NEEDED_FLAGS["AVX2"] <= processor_flags(), reason="the processor does not offer AVX2")
def test_instructions_that_a_variable_withholds_from_torch_hurt():
    environ = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    command = [sys.executable, "-m", "counterpoint", "doctor", "-n", "1"]
    seen = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    (line,) = [line for line in seen.stdout.splitlines() if line.startswith("hurts   instructions")]
    assert "with ATEN_CPU_CAPABILITY=default, torch computes with DEFAULT, but the processor offers AVX" in line
    assert line.endswith("; unset ATEN_CPU_CAPABILITY")


H100 = GpuInfo("NVIDIA H100", 80 << 30, 79 << 30, "0000:01:00.0")
FULL = GpuInfo("NVIDIA H100", 80 << 30, 12 << 30)
OLD = GpuInfo("Tesla T4", 16 << 30, 16 << 30)
DRIVER = {"driver": "580.95.05", "runtime": "CUDA 13.0", "nccl": "2.29.7"}


def judged(ranks, **inventory):
    return [
        f"{finding.grade} {finding.subject}: {finding.fact}; {finding.fix}"
        for finding in doctor.judge_devices(DeviceInventory(**inventory), ranks)
    ]


def test_a_host_without_gpus_has_no_line_about_them():
    assert judged(2) == []
    assert judged(2, runtime="CUDA 13.0") == []


def test_a_host_of_equal_gpus_is_good():
    lines = judged(1, gpus=[H100, H100], num_on_host=2, lanes=[PciLanes(16, 16), None], **DRIVER)
    assert lines == [
        "good cuda:0: NVIDIA H100, 79.0 of 80.0 GiB free; ",
        "good cuda:1: NVIDIA H100, 79.0 of 80.0 GiB free; ",
        "good GPU peers: every GPU accesses the memory of every other; ",
        "good GPU driver: driver 580.95.05, torch's CUDA 13.0; ",
        "good NCCL: NCCL 2.29.7; ",
        "good GPU plans: plan --cluster 8xh100 predicts these GPUs from a roofline of their data sheet, not from a "
        "measurement; ",
    ]


@pytest.mark.parametrize(
    ("ranks", "inventory", "line"),
    [
        (1, {"gpus": [FULL]}, "hurts cuda:0: NVIDIA H100, 12.0 of 80.0 GiB free; another program uses the rest"),
        (
            1,
            {"gpus": [H100, OLD]},
            "hurts GPU kinds: they differ: cuda:0 NVIDIA H100, cuda:1 Tesla T4; synchronous ranks",
        ),
        (
            1,
            {"gpus": [H100], "lanes": [PciLanes(8, 16)]},
            "hurts GPU link: cuda:0 uses 8 of 16 PCIe lanes; batches arrive",
        ),
        (
            1,
            {"gpus": [H100] * 2, "without_peer_access": [(0, 1)]},
            "hurts GPU peers: no direct access between cuda:0 and cuda:1; what they",
        ),
        (
            3,
            {"gpus": [H100] * 2},
            "hurts GPU ranks: 3 ranks, but 2 GPUs: processes of a host need a GPU each; use at most 2,",
        ),
        (
            2,
            {"gpus": [H100]},
            "hurts GPU ranks: 2 ranks, but 1 GPU: processes of a host need a GPU each; use at most 1,",
        ),
        (2, {"gpus": [H100] * 2}, "good GPU ranks: 2 ranks and 2 GPUs: each process takes one"),
        (1, {"num_on_host": 0}, "hurts GPUs: driver 580.95.05 has no GPU; look at dmesg and nvidia-smi"),
        (
            1,
            {"gpus": [H100], "num_on_host": 4, "visible": [("CUDA_VISIBLE_DEVICES", "1")]},
            "good visible GPUs: CUDA_VISIBLE_DEVICES='1': this process sees 1 of 4 GPUs; ",
        ),
        (
            1,
            {"gpus": [H100], "num_on_host": 4, "visible": [("CUDA_VISIBLE_DEVICES", "0,7,1")]},
            "hurts visible GPUs: CUDA_VISIBLE_DEVICES='0,7,1': this process sees 1 of 4 GPUs; it names 3, but the first",
        ),
        (
            1,
            {"num_on_host": 4, "visible": [("CUDA_VISIBLE_DEVICES", "")]},
            "note visible GPUs: CUDA_VISIBLE_DEVICES='': this process sees 0 of 4 GPUs; unset CUDA_VISIBLE_DEVICES",
        ),
        (
            1,
            {"gpus": [H100], "num_on_host": 2},
            "hurts visible GPUs: this process sees 1 of 2 GPUs; the driver and torch's",
        ),
        (
            1,
            {"num_on_host": 2, "runtime": None},
            "hurts visible GPUs: 2 GPUs, but torch is built without CUDA; pip install",
        ),
    ],
)
def test_what_hurts_on_a_gpu_is_said_with_a_remedy(ranks, inventory, line):
    assert any(found.startswith(line) for found in judged(ranks, **{**DRIVER, **inventory}))


def test_the_kernel_says_the_driver_and_the_lanes(tmp_path):
    assert read_driver(tmp_path) == (None, None)
    assert read_lanes(tmp_path, "0000:01:00.0") is None
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs)\nGCC version: gcc 13\n"
    (tmp_path / "proc/driver/nvidia/version").write_text(text)
    folder = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "current_link_width").write_text("8\n")
    (folder / "max_link_width").write_text("16\n")
    assert read_driver(tmp_path) == ("580.95.05", 1)
    assert read_lanes(tmp_path, "0000:01:00.0") == PciLanes(8, 16)
    assert read_lanes(tmp_path, None) is None


def test_variables_that_choose_gpus_are_read_and_an_empty_one_too():
    assert visibility_variables({"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "1"}) == [
        ("CUDA_VISIBLE_DEVICES", ""),
        ("HIP_VISIBLE_DEVICES", "1"),
    ]
    assert visibility_variables({}) == []


def test_the_inventory_of_this_host_is_judged():
    inventory = take_inventory([])
    assert len(inventory.lanes) == len(inventory.gpus)
    assert [finding.grade for finding in doctor.check_devices(1) if finding.grade == "broken"] == []
