import pytest
from typer.testing import CliRunner

from counterpoint.cli import doctor
from counterpoint.cli.main import build_app
from counterpoint.launchers.variables import allocator_variables, requested_threads
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
