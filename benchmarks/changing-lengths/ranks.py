"""One rank: trains on the same batches in changing order and sorted by length, in turns; prints seconds as JSON."""

import json
import os
import random
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from counterpoint.jobs.models import GPT, GPTShape

NUM_LENGTHS, NUM_MICROBATCHES, BATCH = 10, 4, 16
FORMS = {"full": (6, 256, 128, 4096), "quick": (2, 16, 40, 32)}  # layers, width, context, tokens


def build_gpt(layers, width, context, tokens):
    shape = GPTShape(num_layers=layers, width=width, head_dim=width // 4, context=context, num_tokens=tokens, dropout=0)
    return GPT(shape)


def build_gpt2(layers, width, context, tokens):
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(
        vocab_size=tokens, n_positions=context, n_embd=width, n_layer=layers, n_head=4, use_cache=False, **dropouts
    )
    return GPT2LMHeadModel(config)


MODELS = {"gpt": build_gpt, "gpt2": build_gpt2}


def token_loss(output, labels):
    logits = output if isinstance(output, torch.Tensor) else output["logits"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def count_traces():
    """Return a list that gets an entry for each call of torch.export."""
    calls, export = [], torch.export.export

    def count(*args, **kwargs):
        calls.append(1)
        return export(*args, **kwargs)

    torch.export.export = count
    return calls


def run_pass(step, batches):
    """Return the seconds of the steps on some batches, each rank's barrier included."""
    began = time.perf_counter()
    losses = [step(*batch) for batch in batches]
    return time.perf_counter() - began, losses


def main(kind, form, num_turns):
    torch.set_num_threads(1)
    *_, context, tokens = FORMS[form]
    lengths = [context * (number + 1) // NUM_LENGTHS for number in range(NUM_LENGTHS)] * (1 if form == "quick" else 4)
    draw = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, tokens, (BATCH, length), generator=draw) for length in sorted(lengths)]
    batches = [(one, one.roll(-1, 1)) for one in sequences]
    torch.manual_seed(0)
    model: nn.Module = MODELS[kind](*FORMS[form])
    calls = count_traces()
    found = {"rank": int(os.environ["RANK"]), "sorted": [], "changing": []}
    with cp.parallelize(
        model,
        lambda params: torch.optim.SGD(params, lr=1e-3),
        token_loss,
        strategy="pipeline(2)",
        num_microbatches=NUM_MICROBATCHES,
    ) as step:
        run_pass(step, batches)
        before = len(calls)
        for turn in range(num_turns):
            shuffled = random.Random(turn).sample(batches, len(batches))
            for order in ("sorted", "changing") if turn % 2 else ("changing", "sorted"):
                seconds, losses = run_pass(step, batches if order == "sorted" else shuffled)
                found[order].append(seconds)
        found |= {"traces": before, "later_traces": len(calls) - before, "loss": float(losses[-1])}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
