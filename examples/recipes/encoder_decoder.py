"""Train an encoder and a decoder in a custom training loop, on pairs of sequences of different lengths.

python examples/recipes/encoder_decoder.py --strategy "pipeline(2)"
"""

import argparse

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import T5Config, T5ForConditionalGeneration

import counterpoint as cp

PADDING, END = 0, 1


class Reversals(Dataset):
    """Sequences of 3 to 8 numbers, and the same backwards."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        length = int(torch.randint(3, 9, (1,), generator=generator))
        numbers = torch.randint(2, 12, (length,), generator=generator)
        return {"input_ids": numbers, "labels": torch.cat([numbers.flip(0), torch.tensor([END])])}


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch of sequences; labels of -100 do not count."""
    tokens = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True, padding_value=PADDING)
    labels = pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=-100)
    return {"input_ids": tokens, "attention_mask": (tokens != PADDING).long(), "labels": labels}


def main(arguments: list[str] | None = None) -> float:
    """Train, and return the fraction of held-out sequences that are reversed without a mistake."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="data(2)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--dropout", type=float, default=0.1)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)  # the same initial weights, and the same order of samples, in every process
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    config = T5Config(vocab_size=12, decoder_start_token_id=PADDING, dropout_rate=options.dropout, **sizes)
    model = T5ForConditionalGeneration(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(Reversals(0, 32 * options.steps), batch_size=32, shuffle=True, collate_fn=pad)
    with cp.parallelize(model, optimizer, lambda output, _: output.loss, strategy=options.strategy) as step:
        schedule = torch.optim.lr_scheduler.LinearLR(step.optimizer, 1.0, 0.1, options.steps)
        losses = []
        for batch in loader:
            losses.append(step(batch))
            schedule.step()
    model.eval()
    batch = pad([Reversals(10**6, 64)[index] for index in range(64)])
    found = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_length=10, do_sample=False)
    found = torch.nn.functional.pad(found[:, 1:], (0, batch["labels"].shape[1]))[:, : batch["labels"].shape[1]]
    right = float(((found == batch["labels"]) | (batch["labels"] == -100)).all(1).float().mean())
    print(f"{options.strategy}: loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last; {right:.0%} right")
    return right


if __name__ == "__main__":
    main()
