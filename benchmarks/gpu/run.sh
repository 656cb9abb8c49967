#!/bin/bash
# Measure on a machine with one GPU and without a network: bash benchmarks/gpu/run.sh OUT [part ...]
# The folder .gpu, filled by benchmarks/gpu/pack.sh, has the wheels, the native library and NCCL.
set -u
out=$1; shift
parts=${*:-facts survey throughput nccl}
export PYTHONUNBUFFERED=1 PYTHONPATH=/tmp/site:$PWD/src
[ -d /tmp/site ] || python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target /tmp/site .gpu/*.whl
[ -f src/counterpoint/fabric/shm/_native.so ] || cp .gpu/_native.so src/counterpoint/fabric/shm/
[ -f /tmp/libnccl.so.2 ] || xz -dkc .gpu/libnccl-sm90.so.2.xz > /tmp/libnccl.so.2

measure() {  # name, limit in seconds, command
  local name=$1 limit=$2; shift 2
  case " $parts " in *" $name "*) ;; *) return ;; esac
  echo "== $name"
  local start=$SECONDS
  timeout -k 5 "$limit" "$@" 2>&1 | tee "$out/$name.log" | tail -n 120
  echo "== $name: exit ${PIPESTATUS[0]} after $((SECONDS - start)) s"
}

measure facts 60 python3 benchmarks/gpu/facts.py
measure nccl 90 bash -c 'for n in 2 4; do LD_PRELOAD=/tmp/libnccl.so.2 NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 \
  NCCL_MAX_CTAS=2 timeout 40 python3 -m torch.distributed.run --standalone --nproc-per-node $n benchmarks/gpu/nccl_ranks.py; done'
measure survey 240 python3 benchmarks/gpu/survey.py --out "$out/survey.json" --timeout 60
measure throughput 200 python3 benchmarks/gpu/throughput.py --out "$out/throughput.json"
measure tests 240 python3 -m pytest -q -n 14 -p no:cacheprovider -p no:benchmark --maxfail 200 --timeout 60 \
  -m "not serial and not integration" tests/runtime tests/strategies tests/training tests/fabric tests/compat/test_operations.py
