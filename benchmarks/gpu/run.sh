#!/bin/bash
# Measure on a machine with one GPU and without a network, in less than nine minutes, and print a table:
#   bash benchmarks/gpu/run.sh FOLDER [part ...]
# With --dry-run it does the same with small sizes on the stand-in device, for which no GPU is needed.
# The folder .gpu, if it is there, has wheels, the native library and NCCL for a machine that lacks them: pack.sh fills it.
set -u
cd "$(dirname "$0")/../.."
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}
if [ -d .gpu ]; then
  export PYTHONPATH=/tmp/site:$PYTHONPATH
  [ -d /tmp/site ] || $python -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target /tmp/site .gpu/*.whl
  [ -f src/counterpoint/fabric/shm/_native.so ] || cp .gpu/_native.so src/counterpoint/fabric/shm/
  [ -f /tmp/libnccl.so.2 ] || xz -dkc .gpu/libnccl-sm90.so.2.xz > /tmp/libnccl.so.2
fi
exec $python -m benchmarks.gpu.run_parts "$@"
