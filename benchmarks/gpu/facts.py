"""Print the versions and the speeds that bound a training step: matrix products, copies and the link to the host."""

import sys
import time

import torch


def median_s(run, n=10):
    for _ in range(3):
        run()
    times = []
    for _ in range(n):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[n // 2]


def measure_link(there, *, is_pinned):
    host = torch.empty(len(there), dtype=torch.uint8, pin_memory=is_pinned)
    up = len(host) / median_s(lambda: there.copy_(host, non_blocking=True)) / 1e9
    down = len(host) / median_s(lambda: host.copy_(there, non_blocking=True)) / 1e9
    return f"{'pinned' if is_pinned else 'pageable'} host memory: {up:.1f} GB/s to the device, {down:.1f} GB/s from it"


def main():
    print(sys.version.split()[0], "torch", torch.__version__, "NCCL", torch.cuda.nccl.version())
    print(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory >> 20, "MiB")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    print(f"bf16 product: {2 * 8192**3 / median_s(lambda: a @ b) / 1e12:.0f} TFLOP/s")
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    print(f"copy on the device: {2 * 2**30 / median_s(lambda: target.copy_(source)) / 1e12:.2f} TB/s, read and written")
    for is_pinned in (True, False):
        print(measure_link(target[: 1 << 28], is_pinned=is_pinned))
    small = torch.ones(8, device="cuda")
    print(f"launch and wait: {median_s(lambda: small.add_(1), 200) * 1e6:.1f} us")


if __name__ == "__main__":
    main()
