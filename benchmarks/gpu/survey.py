"""Train small models under every strategy on a GPU and compare the numbers with the same run on the CPU.

    python benchmarks/gpu/survey.py --device cuda --out survey.json

Each case runs in processes of its own, many at a time, so that one that crashes or hangs is one line of the table. In
float64, losses and parameters must equal those of the CPU; with dropout, those of one rank on the same device.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from functools import partial
from pathlib import Path

TOLERANCE = 1e-10
STRATEGIES = (
    "solo",
    "data(2)",
    "data(2) + overlap",
    "data(2, compress=fp16)",
    "data(2, compress=int8)",
    "data(2, compress=topk)",
    "data(2, compress=powersgd)",
    "tree(2)",
    "zero(2, level=1)",
    "zero(2, level=2)",
    "zero(2, level=3)",
    "pipeline(2, schedule=gpipe)",
    "pipeline(2)",
    "pipeline(2, schedule=zero_bubble)",
    "pipeline(2, schedule=interleaved, chunks_per_stage=2)",
    "tensor(2)",
    "server(2)",
    "pipeline(2) * data(2)",
    "tensor(2) * data(2)",
    "zero(2, level=3) * data(2)",
)
ASYNCHRONOUS = ("pipeline(2, schedule=pipedream)", "data(2, sync_every=2)", "server(2, consistency=asp)")
PROCESS_STRATEGIES = (
    "data(2)",
    "data(2) + overlap",
    "zero(2, level=1)",
    "zero(2, level=3)",
    "pipeline(2)",
    "tensor(2)",
    "server(2)",
)
MODELS = ("mlp", "gpt", "dropout", "batch_norm", "sync_batch_norm", "embedding")
MODEL_STRATEGIES = ("solo", "data(2)", "zero(2, level=3)", "pipeline(2)", "pipeline(2) * data(2)")
OPTIONS = {
    "clip": {"clip_norm": 0.5},
    "check_gradients": {"check_finite": "gradients", "nonfinite": "skip"},
    "recompute": {"passes": ("recompute",)},
}


def make_cases(device: str) -> list[dict]:
    cases = [{"model": "mlp", "strategy": strategy} for strategy in STRATEGIES + ASYNCHRONOUS]
    cases += [{"model": model, "strategy": s} for model in MODELS[1:] for s in MODEL_STRATEGIES]
    for name in OPTIONS:
        cases += [{"model": "mlp", "strategy": s, "options": name} for s in MODEL_STRATEGIES]
    cases += [{"model": "dropout", "strategy": s, "options": "recompute"} for s in ("solo", "pipeline(2)")]
    cases += [{"model": "trainer", "strategy": s} for s in MODEL_STRATEGIES]
    for transport in ("shm", "gloo"):
        cases += [{"model": "mlp", "strategy": s, "transport": transport} for s in PROCESS_STRATEGIES]
    return [{"device": device, **case} for case in cases]


def case_name(case: dict) -> str:
    parts = [case["model"], case["strategy"], case.get("options", ""), case.get("transport", "")]
    return " | ".join(part for part in parts if part)


# One case, in a process of its own.


def build_model(name: str):
    import torch
    from torch import nn

    from counterpoint.jobs.job import sequence_loss
    from counterpoint.jobs.models import GPT, GPTShape

    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 4, (8,), generator=draw)
    if name == "gpt":
        model = GPT(GPTShape(num_layers=2, width=32, head_dim=8, context=16, num_tokens=64, dropout=0.0))
        tokens = torch.randint(0, 64, (8, 17), generator=draw)
        return model.double(), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), sequence_loss
    if name == "embedding":
        model = nn.Sequential(nn.EmbeddingBag(64, 16, sparse=True), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        return model.double(), (torch.randint(0, 64, (8, 5), generator=draw), labels), nn.functional.cross_entropy
    layers = {"dropout": [nn.Dropout(0.3)], "batch_norm": [nn.BatchNorm1d(32)], "sync_batch_norm": [nn.BatchNorm1d(32)]}
    model = nn.Sequential(
        nn.Linear(16, 32, bias=not name.endswith("batch_norm")),  # its gradient would be rounding errors alone
        *layers.get(name, []),
        nn.GELU(),
        *(layer for _ in range(2) for layer in (nn.Linear(32, 32), nn.GELU())),
        nn.Linear(32, 4),
    )
    inputs = torch.randn(8, 16, generator=draw, dtype=torch.float64)
    return model.double(), (inputs, labels), nn.functional.cross_entropy


def train(case: dict, strategy: str, device: str, num_steps: int = 4) -> dict:
    """Return the losses, the trained parameters and the places where the host waited in the last step."""
    import torch

    import counterpoint as cp

    text, _, added_pass = strategy.partition(" + ")
    options = dict(OPTIONS.get(case.get("options", ""), {}))
    if case["strategy"] not in ASYNCHRONOUS:
        num_replicas = 2 ** sum(text.count(word) for word in ("data(", "zero(", "tree("))
        options["num_microbatches"] = 4 // num_replicas
    if added_pass:
        options["passes"] = (*options.get("passes", ()), added_pass)
    if case["model"] == "sync_batch_norm":
        options["batch_norm"] = "sync"
    model, (inputs, targets), loss = build_model(case["model"])
    model, inputs, targets = model.to(device), inputs.to(device), targets.to(device)
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    if case["model"] == "embedding":
        optimizer = partial(torch.optim.SGD, lr=0.1)
    waits: collections.Counter = collections.Counter()
    with cp.parallelize(model, optimizer(model.parameters()), loss, strategy=text, timeout_s=30.0, **options) as step:
        losses = [float(step(inputs, targets)) for _ in range(num_steps - 1)]
        if device == "cuda":
            with CountWaits(waits):
                losses.append(float(step(inputs, targets)))
        else:
            losses.append(float(step(inputs, targets)))
    devices = sorted({parameter.device.type for parameter in model.parameters()})
    return {
        "losses": losses,
        "params": [parameter.detach().cpu() for parameter in model.parameters()],
        "devices": devices,
        "waits": dict(waits),
    }


class CountWaits:
    """Count by source line how often the host waits for the device."""

    def __init__(self, waits: collections.Counter) -> None:
        self.waits = waits

    def __enter__(self) -> None:
        import torch

        self.filter = warnings.catch_warnings()
        self.filter.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self.record
        torch.cuda.set_sync_debug_mode("warn")

    def record(self, message, *_: object) -> None:
        if "synchroniz" in str(message):
            self.waits[source_line(traceback.extract_stack())] += 1

    def __exit__(self, *_: object) -> None:
        import torch

        torch.cuda.set_sync_debug_mode("default")
        self.filter.__exit__(None, None, None)


def source_line(stack) -> str:
    for frame in reversed(stack):
        if "counterpoint/" in frame.filename and "benchmarks" not in frame.filename:
            return "/".join(frame.filename.split("/")[-3:]) + f":{frame.lineno}"
    return "autograd thread"


def train_with_trainer(case: dict, device: str) -> dict:
    import torch
    from torch.utils.data import TensorDataset

    import counterpoint as cp

    model, (inputs, targets), loss = build_model("mlp")
    dataset = TensorDataset(inputs.repeat(4, 1), targets.repeat(4))
    trainer = cp.Trainer(
        model.to(device), loss=loss, optimizer=partial(torch.optim.AdamW, lr=1e-2), strategy=case["strategy"]
    )
    history = trainer.fit(dataset, batch_size=8, epochs=2)
    return {
        "losses": list(history.losses),
        "params": [parameter.detach().cpu() for parameter in model.parameters()],
        "devices": sorted({parameter.device.type for parameter in model.parameters()}),
        "waits": {},
    }


def run_case(case: dict) -> dict:
    import torch

    torch.set_num_threads(1)
    device = case["device"]
    result: dict = {}
    try:
        if case["model"] == "trainer":
            expected, actual = train_with_trainer(case, "cpu"), train_with_trainer(case, device)
        elif case["model"] == "dropout":
            expected, actual = train(case, "solo", device), train(case, case["strategy"], device)
        elif "transport" in case:  # the CPU's run has its processes too
            expected, actual = train(case, case["strategy"], "cpu"), train(case, case["strategy"], device)
        else:
            expected, actual = train(case, case["strategy"], "cpu"), train(case, case["strategy"], device)
        difference = max(
            [
                abs(a - b) / max(abs(b), 1e-30)
                for a, b in zip(actual["losses"], expected["losses"], strict=True)
                if not math.isnan(a) or not math.isnan(b)  # the first steps of an asynchronous pipeline have no loss
            ]
            + [
                float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
                for a, b in zip(actual["params"], expected["params"], strict=True)
            ]
        )
        result = {
            "outcome": "same" if difference <= TOLERANCE else "differs",
            "difference": difference,
            "devices": actual["devices"],
            "waits": actual["waits"],
        }
    except BaseException as error:  # noqa: BLE001 - an outcome of the survey
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "counterpoint/" in f.filename]
        lines = ["/".join(f.filename.split("/")[-3:]) + f":{f.lineno}" for f in frames[::-1][:4]]
        kind = "refused" if type(error).__name__ in {"PlanError", "UnsupportedError"} else "error"
        message = str(error).splitlines()[0][:400] if str(error) else ""
        result = {"outcome": kind, "error": f"{type(error).__name__}: {message}", "at": lines}
    return result


# All cases.


def measure_case(case: dict, timeout_s: float) -> dict:
    num_ranks = "3" if case["strategy"].startswith("server") else "2"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result"
        command = [sys.executable, __file__, "--case", json.dumps(case), "--out", str(path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if "transport" in case:
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                num_ranks,
                *command[1:],
            ]
            environment["COUNTERPOINT_TRANSPORT"] = case["transport"]
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return {**case, "outcome": "hangs", "error": f"killed after {timeout_s:.0f} s"}
        results = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("result*"))]
        if not results or (process.returncode and all(r["outcome"] == "same" for r in results)):
            kind = "crashes" if "SIG" in output or process.returncode < 0 else "error"
            lines = [line for line in output.splitlines() if line.strip()]
            signals = [line.strip() for line in lines if "Signal" in line or "SIG" in line]
            return {**case, "outcome": kind, "error": (signals or lines or [""])[-1][:300]}
        order = ("crashes", "error", "differs", "refused", "same")
        return {**case, **min(results, key=lambda result: order.index(result["outcome"]))}


def print_table(results: list[dict]) -> None:
    for result in results:
        text = f"{result['outcome']:8s} {case_name(result):56s} "
        if "error" in result:
            text += f"{result['error'][:150]}  at {' < '.join(result.get('at', []))}"
        else:
            counts = sorted(result["waits"].items(), key=lambda item: -item[1])
            places = ", ".join(f"{count}x {place}" for place, count in counts[:6])
            text += f"{result['difference']:.1e} on {'+'.join(result['devices'])}; "
            text += f"{sum(result['waits'].values())} waits: {places}"
        print(text)
    print(dict(collections.Counter(result["outcome"] for result in results)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--case")
    parser.add_argument("--out", required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="")
    parser.add_argument("--timeout", type=float, default=90.0)
    arguments = parser.parse_args()
    if arguments.case:
        result = run_case(json.loads(arguments.case))
        Path(arguments.out + os.environ.get("RANK", "")).write_text(json.dumps(result))
        return
    cases = [case for case in make_cases(arguments.device) if arguments.only in case_name(case)]
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(lambda case: measure_case(case, arguments.timeout), cases))
    print_table(results)
    Path(arguments.out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
