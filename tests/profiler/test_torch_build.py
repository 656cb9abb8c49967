"""What torch computes with is read as it is, and everything that costs speed is said with its remedy."""

import json
import platform
from dataclasses import asdict, replace

import pytest
import torch

from counterpoint.device.cuda import read_gpu_libraries
from counterpoint.device.inventory import GpuLibraries
from counterpoint.launchers.machine import processor_flags
from counterpoint.launchers.variables import instruction_variables
from counterpoint.profiler.torch_build import FLAGS, NEEDED_FLAGS, TorchBuild, find_speed_costs, read_torch_build

WIDEST = tuple(flag for flag in FLAGS if flag not in {"asimd", "asimdhp", "sve", "bf16"})
GOOD = TorchBuild(
    version="2.13.0",
    machine="x86_64",
    capability="AVX512",
    flags=WIDEST,
    blas="mkl",
    lapack="mkl",
    mkl="2024.2",
    onednn="3.12.0",
    onednn_dtypes=("bf16", "fp16"),
    openmp="4.5",
    num_threads=8,
)
AVX2 = ("fma", "f16c", "avx2")
GPU = GpuLibraries(runtime="CUDA 13.0", cudnn="91900", nccl="2.29.7", matmul="tf32", has_tf32=True)


def costs(**changes):
    return [f"{cost.grade} {cost.subject}: {cost}" for cost in find_speed_costs(replace(GOOD, **changes))]


def test_a_build_that_uses_all_that_the_processor_offers_costs_nothing():
    assert costs() == []
    assert costs(gpu=GPU) == []
    assert costs(machine="aarch64", capability="DEFAULT", flags=("asimd",), blas="open", onednn_dtypes=()) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"capability": "DEFAULT", "variables": {"ATEN_CPU_CAPABILITY": "default"}},
            "hurts instructions: with ATEN_CPU_CAPABILITY=default, torch computes with DEFAULT, but the processor offers "
            "AVX512: norms, softmax, activations and optimizers process fewer numbers per instruction; unset "
            "ATEN_CPU_CAPABILITY",
        ),
        (
            {"capability": "AVX2"},
            "hurts instructions: torch computes with AVX2, but the processor offers AVX512: norms, softmax, activations "
            "and optimizers process fewer numbers per instruction; install a build with kernels for AVX512",
        ),
        (
            {"variables": {"ONEDNN_MAX_CPU_ISA": "AVX2"}},
            "note instructions: ONEDNN_MAX_CPU_ISA=AVX2 is set: oneDNN uses no wider instructions than that, for "
            "convolutions and bf16; unset ONEDNN_MAX_CPU_ISA",
        ),
        (
            {"onednn_dtypes": ("bf16",)},
            "note fp16: oneDNN does not compute in fp16 on this processor: with precision='fp16', matrix products on "
            "this CPU take many times as long as in float32; compute in float32 here, or on a GPU",
        ),
        (
            {"flags": tuple(flag for flag in WIDEST if flag not in {"amx_bf16", "avx512_bf16"})},
            "note bf16: the processor does not offer amx_bf16 or avx512_bf16: oneDNN converts to float32, so that "
            "precision='bf16' saves memory on this CPU, but no time; compute in float32 here, or on a GPU",
        ),
        (
            {"blas": "generic"},
            "hurts BLAS: torch's BLAS is generic: matrix products are not tuned for this processor; install a build with "
            "MKL or OpenBLAS",
        ),
        (
            {"onednn": None},
            "hurts oneDNN: torch is built without oneDNN: convolutions and bf16 are computed by slower kernels; install "
            "a build with it",
        ),
        (
            {"uses_onednn": False},
            "hurts oneDNN: torch.backends.mkldnn.enabled is False: convolutions and bf16 are computed by slower kernels; "
            "set it to True",
        ),
        (
            {"openmp": None},
            "hurts OpenMP: torch is built without OpenMP: MKL and oneDNN compute matrix products and convolutions with "
            "one thread; install a build with it",
        ),
        (
            {"is_debug": True},
            "hurts torch build: torch is a debug build: it is compiled without optimization; install a release build",
        ),
        (
            {"gpu": replace(GPU, cudnn=None)},
            "hurts cuDNN: torch with CUDA 13.0 finds no cuDNN: convolutions on GPUs are computed by slower kernels; "
            "install the version that this build needs",
        ),
        (
            {"gpu": replace(GPU, uses_cudnn=False)},
            "hurts cuDNN: torch.backends.cudnn.enabled is False: convolutions on GPUs are computed by slower kernels; "
            "set it to True",
        ),
        (
            {"gpu": replace(GPU, nccl=None)},
            "note NCCL: torch with CUDA 13.0 has no NCCL: tensors of GPUs travel through host memory; install a build "
            "with it for several GPUs",
        ),
        (
            {"gpu": replace(GPU, matmul="none")},
            "note TF32: float32 matrix products do not use TF32: GPUs multiply in TF32 several times as fast, with 10 "
            "bits of mantissa instead of 23; torch.set_float32_matmul_precision('high'), if that is accurate enough",
        ),
    ],
)
def test_each_thing_that_costs_speed_is_said_alone_with_cause_rule_and_remedy(changes, line):
    assert costs(**changes) == [line]


@pytest.mark.parametrize(
    "changes",
    [
        {"flags": AVX2, "capability": "AVX2", "onednn_dtypes": ()},
        {"flags": ("avx2",), "capability": "DEFAULT", "onednn_dtypes": ()},  # torch's kernels need fma, too
        {"variables": {"ONEDNN_MAX_CPU_ISA": "default"}},
        {"blas": "unknown"},
        {"gpu": replace(GPU, matmul="none", has_tf32=False)},
    ],
)
def test_what_the_processor_does_not_offer_and_what_is_not_known_does_not_hurt(changes):
    assert [line for line in costs(**changes) if line.startswith("hurts") or "instructions" in line] == []


def test_one_line_has_all_versions():
    build = replace(GOOD, flags=AVX2, capability="AVX2", onednn=None, gpu=replace(GPU, nccl=None))
    assert str(build) == (
        "torch 2.13.0, AVX2 (the processor offers fma f16c avx2), BLAS mkl 2024.2, LAPACK mkl, oneDNN none, OpenMP 4.5, "
        "CUDA 13.0, cuDNN 91900, NCCL none, threads 8"
    )


def test_the_build_of_this_process_is_what_torch_says():
    build = read_torch_build()
    text = torch.__config__.show()
    assert build.version == torch.__version__
    assert f"CPU capability usage: {build.capability}" in text
    assert build.num_threads == torch.get_num_threads()
    assert (build.mkl is None) == (not torch.backends.mkl.is_available())
    assert (build.openmp is None) == (not torch.backends.openmp.is_available())
    assert (build.onednn is None) == (not torch.backends.mkldnn.is_available())
    for version in (build.mkl, build.onednn, build.openmp):
        assert version is None or version in text
    assert build.blas == "unknown" or f"BLAS_INFO={build.blas}" in text
    assert (build.gpu is None) == (torch.version.cuda is None and torch.version.hip is None)
    assert json.loads(json.dumps(asdict(build)))["capability"] == build.capability


@pytest.mark.skipif(platform.machine() != "x86_64", reason="torch tells the flags of x86 processors")
def test_the_kernel_and_torch_say_the_same_of_the_processor():
    flags = processor_flags()
    has = {"AVX2": torch.cpu._is_avx2_supported(), "AVX512": torch.cpu._is_avx512_supported()}
    assert {name: needed <= flags for name, needed in NEEDED_FLAGS.items()} == has
    assert ("avx512_bf16" in flags) == torch.cpu._is_avx512_bf16_supported()


def test_the_kernels_files_say_what_the_processor_offers(tmp_path):
    assert processor_flags(tmp_path) == frozenset()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    )
    assert processor_flags(tmp_path) == {"fpu", "avx2", "fma"}
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert processor_flags(tmp_path) == {"fp", "asimd", "bf16"}


def test_onednn_that_is_switched_off_in_this_process_is_seen(monkeypatch):
    assert read_torch_build().uses_onednn
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not read_torch_build().uses_onednn


def test_only_variables_that_are_set_limit_instructions():
    variables = {"ATEN_CPU_CAPABILITY": "avx2", "DNNL_MAX_CPU_ISA": "", "MKL_NUM_THREADS": "2"}
    assert instruction_variables(variables) == {"ATEN_CPU_CAPABILITY": "avx2"}


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_build_of_which_parts_are_missing_is_read_without_them(monkeypatch):
    """The function of torch that says NCCL's version is absent from builds without it: asking failed."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    libraries = read_gpu_libraries()
    assert libraries is not None
    assert (libraries.runtime, libraries.cudnn, libraries.nccl, libraries.has_tf32) == ("CUDA 13.0", None, None, False)

    def refuse():
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    assert read_gpu_libraries() == libraries
