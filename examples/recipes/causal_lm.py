"""Train a language model on texts of different lengths: every token has the same weight, whatever its batch.

python examples/recipes/causal_lm.py --strategy "zero3(2)"
"""

import argparse
import math
import tempfile
from functools import partial
from pydoc_data.topics import topics  # texts that are part of Python

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

import counterpoint as cp

PADDING = 256  # the tokens before it are bytes


def read_texts(count: int) -> list[list[int]]:
    """Return paragraphs of 8 to 48 tokens."""
    paragraphs = [paragraph.strip() for topic in topics.values() for paragraph in topic.split("\n\n")]
    return [list(paragraph.encode()[:48]) for paragraph in paragraphs if len(paragraph) >= 8][:count]


def pad(texts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return a batch of texts; labels of -100 do not count."""
    length = max(map(len, texts))
    tokens = torch.tensor([text + [PADDING] * (length - len(text)) for text in texts])
    mask = tokens != PADDING
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": tokens.masked_fill(~mask, -100)}


def build_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices only."""
    params = list(model.parameters())
    matrices, others = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], 3e-3)


def main(arguments: list[str] | None = None) -> float:
    """Train, evaluate, save and load again; return the perplexity of held-out texts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="data(2)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--microbatches", type=int, default=2, help="accumulate the gradients of so many")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--folder", default=f"{tempfile.gettempdir()}/causal_lm")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)  # the same initial weights in every process
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), options.dropout)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=48, n_embd=32, n_layer=2, n_head=2, **rates))
    texts = read_texts(400)
    trainer = cp.Trainer(
        model,
        loss=lambda output, labels: output.loss,
        optimizer=build_optimizer(model),
        lr_scheduler=partial(get_cosine_schedule_with_warmup, num_warmup_steps=3, num_training_steps=options.steps),
        strategy=options.strategy,
        num_microbatches=options.microbatches,
        clip_norm=1.0,
    )
    with trainer:
        loader = DataLoader(texts[64:], batch_size=16, shuffle=True, collate_fn=pad)
        trainer.fit(loader, epochs=10, max_steps=options.steps)
        loss = trainer.evaluate(DataLoader(texts[:64], batch_size=16, collate_fn=pad))["loss"]
    if trainer.rank == 0:
        model.save_pretrained(options.folder)
        saved = GPT2LMHeadModel.from_pretrained(options.folder)
        assert all(map(torch.equal, saved.parameters(), model.parameters()))
        print(f"{options.strategy}: perplexity {math.exp(loss):.1f} in {options.folder}")
    return math.exp(loss)


if __name__ == "__main__":
    main()
