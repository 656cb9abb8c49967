"""The speeds that bound a training step: matrix products, copies, the link to the host, launches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.checks import Check, passes_if
from benchmarks.gpu.target import SPEED_REASON, Target

RESULTS = Path(__file__).parent / "results"
TOLERANCE = 0.1
"""A speed may be so much lower than it was the last time, and a latency so much higher."""


def measure(target: Target) -> Iterator[Check]:
    """Yield what the card does, compared with the newest result of a card of this name in ``results/``."""
    facts = target.facts()
    yield Check("versions", "-", f"torch {facts['torch']}, NCCL {facts['nccl']}", str(facts["driver"] or ""), facts)
    earlier = newest_result(facts["card"])
    for name, value, unit in measure_speeds(target):
        if target.is_dry_run:
            yield Check(name, "SKIP", f"{value:.3g} {unit}", SPEED_REASON, {"value": value, "unit": unit})
        else:
            yield compare(name, value, unit, earlier)


def compare(name: str, value: float, unit: str, earlier: dict) -> Check:
    """Return whether a value is as good as in an earlier result."""
    figures, text = {"value": value, "unit": unit}, f"{value:.4g} {unit}"
    if name not in earlier.get("values", {}):
        return Check(name, "SKIP", text, "results/ has no earlier value of this card", figures)
    before = earlier["values"][name]
    is_latency = unit == "us"
    bound = before * (1 + TOLERANCE) if is_latency else before * (1 - TOLERANCE)
    holds = value <= bound if is_latency else value >= bound
    word = "at most" if is_latency else "at least"
    return Check(name, passes_if(holds), text, f"{word} {bound:.4g}; {before:.4g} on {earlier['date'][:10]}", figures)


def newest_result(card: str, folder: Path = RESULTS) -> dict:
    """Return date and values of the newest ``facts.json`` of a card; empty if there is none."""
    records = [json.loads(path.read_text()) for path in folder.glob("*/facts.json")]
    records = [record for record in records if record["card"] == card]
    if not records:
        return {}
    newest = max(records, key=lambda record: record["date"])
    values = {one["name"]: one["figures"]["value"] for one in newest["checks"] if "value" in one["figures"]}
    return {"date": newest["date"], "values": values}


def measure_speeds(target: Target) -> Iterator[tuple[str, float, str]]:
    """Yield name, value and unit of each."""
    device, width = target.device, target.size(8192, 32)
    a, b = (torch.randn(width, width).to(device, torch.bfloat16) for _ in range(2))
    yield f"bf16 product {width}", 2 * width**3 / target.median_s(lambda: a @ b) / 1e12, "TFLOP/s"
    num_bytes = target.size(1 << 30, 1 << 10)
    source, copy = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    yield (
        "copy on the card, read and written",
        2 * num_bytes / target.median_s(lambda: copy.copy_(source)) / 1e12,
        "TB/s",
    )
    there = copy[: num_bytes // 4]
    for kind, allocate in (("pinned", target.accelerator.empty_pinned), ("pageable", torch.empty)):
        host = allocate(len(there), dtype=torch.uint8)
        seconds = target.median_s(partial(there.copy_, host, non_blocking=True))
        yield f"from {kind} host memory", len(there) / seconds / 1e9, "GB/s"
        seconds = target.median_s(partial(host.copy_, there, non_blocking=True))
        yield f"to {kind} host memory", len(there) / seconds / 1e9, "GB/s"
    small = torch.ones(8, device=device)
    yield "launch and wait", target.median_s(lambda: small.add_(1), 200) * 1e6, "us"
