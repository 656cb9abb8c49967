"""Fine-tune a language model by low-rank adapters: the other weights are frozen, and only the adapters are saved.

python examples/recipes/lora.py --strategy "zero3(2)"
"""

import argparse
import tempfile
from functools import partial
from pydoc_data.topics import topics  # texts that are part of Python

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

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


def build_base() -> LlamaForCausalLM:
    """Return the model that is adapted; a real script loads it with ``from_pretrained``."""
    torch.manual_seed(0)  # the same weights in every process
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=257, **sizes))


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, save the adapters and load them into the base model; return the losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="data(2)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--folder", default=f"{tempfile.gettempdir()}/lora")
    options = parser.parse_args(arguments)

    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=options.dropout, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(build_base(), config)
    trainer = cp.Trainer(
        model,
        loss=lambda output, labels: output.loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        strategy=options.strategy,
        clip_norm=1.0,
    )
    with trainer:
        loader = DataLoader(read_texts(400), batch_size=16, shuffle=True, collate_fn=pad)
        history = trainer.fit(loader, epochs=10, max_steps=options.steps)
    if trainer.rank == 0:
        model.save_pretrained(options.folder)
        saved = PeftModel.from_pretrained(build_base(), options.folder)
        assert all(map(torch.equal, saved.parameters(), model.parameters()))
        print(f"{options.strategy}: loss {history.losses[0]:.4f} at first, {history.losses[-1]:.4f} at last")
    return history.losses


if __name__ == "__main__":
    main()
