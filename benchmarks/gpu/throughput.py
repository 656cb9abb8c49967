"""Train a GPT with one rank and with a hand-written loop on one GPU, alternately, and compare their step times.

    python benchmarks/gpu/throughput.py --out throughput.json

Both run in bfloat16 by autocast, or in float32 with TF32, with a fused AdamW. A step is timed from its call to the end
of its kernels. Model FLOPs utilization counts 6 FLOPs per parameter and token, and the attention's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from pathlib import Path

import torch

import counterpoint as cp
from counterpoint.jobs.job import sequence_loss
from counterpoint.jobs.models import GPT, GPTShape

PEAK_FLOPS = 798e12
"""bf16 matrix product of 8192 x 8192 x 8192, as measured on an H100."""

SIZES = {
    "0.1B": (GPTShape(num_layers=12, width=768, head_dim=64, context=1024, num_tokens=32768, dropout=0.0), 16),
    "0.9B": (GPTShape(num_layers=16, width=2048, head_dim=128, context=1024, num_tokens=32768, dropout=0.0), 8),
}


def measure(size: str, precision: str, strategy: str, num_rounds: int, batch_size: int | None) -> dict:
    shape, default_batch = SIZES[size]
    batch_size = batch_size or default_batch
    torch.set_float32_matmul_precision("high")
    autocast = (lambda: torch.autocast("cuda", torch.bfloat16)) if precision == "bf16" else nullcontext
    with torch.device("cuda"):
        torch.manual_seed(0)
        hand_model = GPT(shape)
        torch.manual_seed(0)
        our_model = GPT(shape)
    num_params = sum(parameter.numel() for parameter in our_model.parameters())
    tokens = torch.randint(0, shape.num_tokens, (batch_size, shape.context + 1), device="cuda")
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    hand_optimizer = torch.optim.AdamW(hand_model.parameters(), lr=1e-4, fused=True)

    def hand_step() -> float:
        with autocast():
            loss = sequence_loss(hand_model(inputs), targets)
        loss.backward()
        hand_optimizer.step()
        hand_optimizer.zero_grad(set_to_none=True)
        return loss.item()

    our_optimizer = torch.optim.AdamW(our_model.parameters(), lr=1e-4, fused=True)
    times: dict[str, list[float]] = {"hand": [], "ours": []}
    losses: dict[str, list[float]] = {"hand": [], "ours": []}
    peaks: dict[str, int] = {}
    with cp.parallelize(our_model, our_optimizer, sequence_loss, strategy=strategy, num_microbatches=1) as step:

        def our_step() -> float:
            with autocast():
                return float(step(inputs, targets))

        for round_number in range(num_rounds + 3):
            for name, run in (("hand", hand_step), ("ours", our_step)):
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                start = time.perf_counter()
                loss = run()
                torch.cuda.synchronize()
                if round_number >= 3:
                    times[name].append(time.perf_counter() - start)
                losses[name].append(loss)
                peaks[name] = torch.cuda.max_memory_allocated() - before
    medians = {name: statistics.median(values) for name, values in times.items()}
    flops_per_token = 6 * num_params + 12 * shape.num_layers * shape.width * shape.context
    num_tokens = batch_size * shape.context
    return {
        "size": size,
        "precision": precision,
        "strategy": strategy,
        "num_params": num_params,
        "batch_size": batch_size,
        "median_s": medians,
        "spread": {name: (max(v) - min(v)) / medians[name] for name, v in times.items()},
        "ratio": medians["hand"] / medians["ours"],
        "tokens_per_s": {name: num_tokens / seconds for name, seconds in medians.items()},
        "mfu": {name: num_tokens * flops_per_token / seconds / PEAK_FLOPS for name, seconds in medians.items()},
        "peak_bytes_of_step": peaks,
        "last_losses": {name: values[-1] for name, values in losses.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--size", action="append", choices=list(SIZES))
    parser.add_argument("--precision", action="append", choices=["bf16", "fp32"])
    parser.add_argument("--strategy", default="solo")
    parser.add_argument("--batch-size", type=int)
    arguments = parser.parse_args()
    results = []
    for size in arguments.size or list(SIZES):
        for precision in arguments.precision or ["bf16", "fp32"]:
            try:
                result = measure(size, precision, arguments.strategy, arguments.rounds, arguments.batch_size)
            except Exception as error:  # noqa: BLE001 - a row of the table
                result = {"size": size, "precision": precision, "error": f"{type(error).__name__}: {error}"[:500]}
            print(json.dumps(result), flush=True)
            results.append(result)
            torch.cuda.empty_cache()
    Path(arguments.out).write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": results}, indent=1))


if __name__ == "__main__":
    main()
