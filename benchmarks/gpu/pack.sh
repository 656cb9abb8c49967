#!/bin/bash
# Fill .gpu/ with what a GPU machine without a network lacks: wheels for Python 3.12, the native library and NCCL for sm_90.
set -eu
cd "$(dirname "$0")/../.."
mkdir -p .gpu build/nccl
for_python="--no-deps --only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux_2_17_x86_64
  --platform manylinux_2_18_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64"
.venv/bin/python -m pip download -q $for_python -d .gpu -c constraints.txt \
  isal pydantic pydantic_core annotated-types typing-inspection cryptography cffi pycparser msgspec
.venv/bin/python -m pip download -q $for_python -d build/nccl nvidia-nccl-cu13==2.30.7
unzip -o -q build/nccl/nvidia_nccl_cu13-2.30.7-*.whl 'nvidia/nccl/lib/libnccl.so.2' -d build/nccl
.venv/bin/python benchmarks/gpu/keep_architecture.py build/nccl/nvidia/nccl/lib/libnccl.so.2 90 build/nccl/libnccl-sm90.so.2
xz -T0 -k -f -3 build/nccl/libnccl-sm90.so.2 && mv build/nccl/libnccl-sm90.so.2.xz .gpu/
cp src/counterpoint/fabric/shm/_native.so .gpu/
packed=$(du -sb .gpu | cut -f 1) tree=$(git ls-files -z | xargs -0 -r stat -c %s | awk '{ total += $1 } END { print total }')
echo ".gpu has $((packed >> 20)) MiB, the tree $((tree >> 20)) MiB"
[ $((packed + tree)) -lt $((64 << 20)) ] || { echo "together they are more than 64 MiB" >&2; exit 1; }
