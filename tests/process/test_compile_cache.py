"""The second start of a compiled job takes all graphs from torch's caches, in every process."""

import json
from pathlib import Path

import pytest

from counterpoint.launchers.local import run_command, script_command

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

TRAINING = """
import json, sys
import torch
from torch import nn, optim
import counterpoint as cp
from counterpoint.jobs.job import sequence_loss
from counterpoint.jobs.models import GPT, GPTShape
from torch._dynamo.utils import counters

model, plan, parts = sys.argv[1:]
torch.manual_seed(0)
if model == "gpt":
    model = GPT(GPTShape(num_layers=2, width=8, head_dim=4, context=4, num_tokens=11, dropout=0.2))
    loss, batch = sequence_loss, (torch.zeros(8, 4, dtype=torch.int64), torch.zeros(8, 4, dtype=torch.int64))
else:  # with a weight whose gradient is written in place
    model = nn.Sequential(nn.Linear(8, 1024), nn.Dropout(0.2), nn.Linear(1024, 512), nn.Tanh(), nn.Linear(512, 4))
    loss, batch = nn.functional.cross_entropy, (torch.zeros(8, 8), torch.zeros(8, dtype=torch.int64))
optimizer = optim.SGD(model.parameters(), lr=0.1)
with cp.parallelize(model, optimizer, loss, strategy=plan, compile=parts, timeout_s=200) as step:
    losses = [float(step(*batch)) for _ in range(2)]
print(json.dumps({"counts": {**counters["inductor"], **counters["aot_autograd"]}, "losses": losses}))
"""


def run(path, arguments, num_ranks):
    """Return the counters of torch's caches in each process, and the losses."""
    lines = []
    result = run_command(script_command(path, arguments), num_ranks, on_line=lambda line: lines.append(line.text))
    found = [json.loads(text[text.index('{"counts"') :]) for text in lines if '{"counts"' in text]
    assert result.exit_code == 0
    assert len(found) == num_ranks
    return [one["counts"] for one in found], found[0]["losses"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan", "parts"),
    [
        ("gpt", "solo", "segments"),
        ("mlp", "solo", "blocks"),
        ("mlp", "data(2)", "segments"),
        ("gpt", "pipeline(2)", "blocks"),
        ("mlp", "zero(2, level=3)", "segments"),
    ],
)
def test_a_second_start_compiles_nothing(model, plan, parts, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    path = Path(tmp_path, "train.py")
    path.write_text(TRAINING)
    num_ranks = 1 if plan == "solo" else 2
    first, losses = run(path, [model, plan, parts], num_ranks)
    second, again = run(path, [model, plan, parts], num_ranks)
    assert all(counts["fxgraph_cache_miss"] for counts in first[:1])
    assert all(counts["fxgraph_cache_hit"] and counts["autograd_cache_hit"] for counts in second)
    assert not any("cache_miss" in name or "cache_bypass" in name for counts in second for name in counts)
    assert losses == again
