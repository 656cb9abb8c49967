"""With which libraries and instruction sets this process computes, and what of it costs speed."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from counterpoint.device.cuda import read_gpu_libraries
from counterpoint.device.inventory import GpuLibraries
from counterpoint.launchers.machine import processor_flags
from counterpoint.launchers.variables import CAPABILITY_VARIABLE, instruction_variables

FLAGS = (
    "fma", "f16c", "avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_fp16", "amx_bf16",
    "asimd", "asimdhp", "sve", "bf16",
)  # fmt: skip
"""The instruction sets of x86 and ARM processors that torch and oneDNN have kernels for, as the kernel names them."""
NEEDED_FLAGS = {"AVX512": {"avx512vl", "avx512bw", "avx512dq", "fma"}, "AVX2": {"avx2", "fma"}}
"""What torch needs to compute with its kernels for each of these, the widest first (``DispatchStub.cpp``)."""
NATIVE_FLAGS = {"bf16": {"avx512_bf16", "amx_bf16"}, "fp16": {"avx512_fp16"}}
"""The instruction sets of x86 that multiply in a dtype."""
UNOPTIMIZED_BLAS = {"none", "eigen", "generic"}
NO_LIMIT = {"ALL", "DEFAULT"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """What a process computes with.

    Args:
        version: of torch.
        machine: the type of the processor, such as ``x86_64``.
        capability: the instruction set of torch's own kernels, such as ``AVX2``.
        flags: what the processor offers, of :data:`FLAGS`.
        blas: the library as torch's build names it, ``none`` without one, ``unknown`` if the build does not say.
        lapack: the same.
        mkl: its version; None for a build without.
        onednn: its version; None for a build without.
        uses_onednn: False if ``torch.backends.mkldnn.enabled`` is.
        onednn_dtypes: the narrow dtypes that oneDNN computes in on this processor.
        openmp: its version; None for a build without.
        num_threads: of one operation.
        is_debug: whether torch is compiled for debugging.
        gpu: libraries for GPUs; None for a build without.
        variables: those that limit instruction sets, with their values.
    """

    version: str
    machine: str
    capability: str
    flags: tuple[str, ...] = ()
    blas: str = "unknown"
    lapack: str = "unknown"
    mkl: str | None = None
    onednn: str | None = None
    uses_onednn: bool = True
    onednn_dtypes: tuple[str, ...] = ()
    openmp: str | None = None
    num_threads: int = 1
    is_debug: bool = False
    gpu: GpuLibraries | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return all of it in one line."""
        flags = f" (the processor offers {' '.join(self.flags)})" if self.flags else ""
        blas = f"{self.blas} {self.mkl}" if self.blas == "mkl" and self.mkl else self.blas
        names = [f"BLAS {blas}", f"LAPACK {self.lapack}", f"oneDNN {self.onednn}", f"OpenMP {self.openmp}"]
        if self.gpu is not None:
            names += [self.gpu.runtime, f"cuDNN {self.gpu.cudnn}", f"NCCL {self.gpu.nccl}"]
        libraries = ", ".join(names).replace(" None", " none")
        return f"torch {self.version}, {self.capability}{flags}, {libraries}, threads {self.num_threads}"


@dataclass(frozen=True, slots=True)
class SpeedCost:
    """One reason why a build or its settings compute more slowly than they could.

    Args:
        subject: what is slow.
        grade: ``note`` if it depends on what the program computes, or is a choice.
        cause: what was found, with values.
        rule: what it costs.
        remedy: what to do.
    """

    subject: str
    grade: Literal["note", "hurts"]
    cause: str
    rule: str
    remedy: str

    def __str__(self) -> str:
        """Return it as one sentence."""
        return f"{self.cause}: {self.rule}; {self.remedy}"


def read_torch_build() -> TorchBuild:
    """Return what this process computes with."""
    text, offered = torch.__config__.show(), processor_flags()
    settings = dict(re.findall(r"(\w+)=([^,]*),", text.partition("Build settings:")[2]))
    unnamed = "none" if settings else "unknown"
    backends: Any = torch.backends  # whose functions have no types
    has_onednn = backends.mkldnn.is_available()
    dtypes = {"bf16": "_is_mkldnn_bf16_supported", "fp16": "_is_mkldnn_fp16_supported"} if has_onednn else {}
    return TorchBuild(
        version=torch.__version__,
        machine=platform.machine(),
        capability=backends.cpu.get_cpu_capability(),
        flags=tuple(flag for flag in FLAGS if flag in offered),
        blas=(settings.get("BLAS_INFO") or unnamed).lower(),
        lapack=(settings.get("LAPACK_INFO") or unnamed).lower(),
        mkl=_find(r"Math Kernel Library Version (\d[\d.]*)", text) if backends.mkl.is_available() else None,
        onednn=_find(r"(?:MKL-DNN|oneDNN) v(\d[\d.]*)", text) if has_onednn else None,
        uses_onednn=backends.mkldnn.enabled,
        onednn_dtypes=tuple(dtype for dtype, name in dtypes.items() if getattr(torch.ops.mkldnn, name)()),
        openmp=_find(r"OpenMP [^\n]*OpenMP (\d[\d.]*)", text) if backends.openmp.is_available() else None,
        num_threads=torch.get_num_threads(),
        is_debug=torch.version.debug,
        gpu=read_gpu_libraries(),
        variables=instruction_variables(),
    )


def find_speed_costs(build: TorchBuild) -> Iterator[SpeedCost]:
    """Yield what costs speed."""
    if build.is_debug:
        rule, remedy = "it is compiled without optimization", "install a release build"
        yield SpeedCost("torch build", "hurts", "torch is a debug build", rule, remedy)
    if build.machine in {"x86_64", "AMD64"}:
        yield from _find_instruction_costs(build)
    if build.blas in UNOPTIMIZED_BLAS:
        rule, remedy = "matrix products are not tuned for this processor", "install a build with MKL or OpenBLAS"
        yield SpeedCost("BLAS", "hurts", f"torch's BLAS is {build.blas}", rule, remedy)
    if build.onednn is None or not build.uses_onednn:
        missing = build.onednn is None
        cause = "torch is built without oneDNN" if missing else "torch.backends.mkldnn.enabled is False"
        remedy = "install a build with it" if missing else "set it to True"
        yield SpeedCost("oneDNN", "hurts", cause, "convolutions and bf16 are computed by slower kernels", remedy)
    if build.openmp is None:
        rule = "MKL and oneDNN compute matrix products and convolutions with one thread"
        yield SpeedCost("OpenMP", "hurts", "torch is built without OpenMP", rule, "install a build with it")
    if build.gpu is not None:
        yield from _find_gpu_costs(build.gpu)


def _find_instruction_costs(build: TorchBuild) -> Iterator[SpeedCost]:
    offered = next((name for name, flags in NEEDED_FLAGS.items() if flags <= set(build.flags)), "DEFAULT")
    levels = ["DEFAULT", *reversed(NEEDED_FLAGS)]
    if build.capability in levels and levels.index(build.capability) < levels.index(offered):
        value = build.variables.get(CAPABILITY_VARIABLE)
        reason = f"with {CAPABILITY_VARIABLE}={value}, " if value else ""
        cause = f"{reason}torch computes with {build.capability}, but the processor offers {offered}"
        rule = "norms, softmax, activations and optimizers process fewer numbers per instruction"
        remedy = f"unset {CAPABILITY_VARIABLE}" if value else f"install a build with kernels for {offered}"
        yield SpeedCost("instructions", "hurts", cause, rule, remedy)
    for name, value in build.variables.items():
        if name != CAPABILITY_VARIABLE and value.upper() not in NO_LIMIT:
            rule = "oneDNN uses no wider instructions than that, for convolutions and bf16"
            yield SpeedCost("instructions", "note", f"{name}={value} is set", rule, f"unset {name}")
    for dtype, flags in NATIVE_FLAGS.items():
        if flags & set(build.flags) and dtype in build.onednn_dtypes:
            continue
        cause = f"the processor does not offer {' or '.join(sorted(flags))}"
        rule = f"oneDNN converts to float32, so that precision={dtype!r} saves memory on this CPU, but no time"
        if dtype not in build.onednn_dtypes:
            cause = f"oneDNN does not compute in {dtype} on this processor"
            rule = f"with precision={dtype!r}, matrix products on this CPU take many times as long as in float32"
        yield SpeedCost(dtype, "note", cause, rule, "compute in float32 here, or on a GPU")


def _find_gpu_costs(gpu: GpuLibraries) -> Iterator[SpeedCost]:
    if gpu.cudnn is None or not gpu.uses_cudnn:
        missing = gpu.cudnn is None
        cause = f"torch with {gpu.runtime} finds no cuDNN" if missing else "torch.backends.cudnn.enabled is False"
        remedy = "install the version that this build needs" if missing else "set it to True"
        yield SpeedCost("cuDNN", "hurts", cause, "convolutions on GPUs are computed by slower kernels", remedy)
    if gpu.nccl is None:
        cause, remedy = f"torch with {gpu.runtime} has no NCCL", "install a build with it for several GPUs"
        yield SpeedCost("NCCL", "note", cause, "tensors of GPUs travel through host memory", remedy)
    if gpu.has_tf32 and gpu.matmul != "tf32":
        rule = "GPUs multiply in TF32 several times as fast, with 10 bits of mantissa instead of 23"
        remedy = "torch.set_float32_matmul_precision('high'), if that is accurate enough"
        yield SpeedCost("TF32", "note", "float32 matrix products do not use TF32", rule, remedy)


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return "of an unknown version" if found is None else found[1].rstrip(".")
