"""Fine-tune a classifier of sentences on a Hugging Face dataset, padded by a data collator.

python examples/recipes/sequence_classification.py --strategy "pipeline(2)"
"""

import argparse
import itertools
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerFast

import counterpoint as cp

FIRST = ("the", "a", "this", "some", "every", "our")
NOUNS = ("film", "book", "song", "meal", "game", "trip")
PRAISE, BLAME = ("lovely", "clever", "great", "fine"), ("dull", "awful", "poor", "weak")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each word."""
    words = ["[PAD]", "[UNK]", "is", "not", "and", "very", *FIRST, *NOUNS, *PRAISE, *BLAME]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def build_dataset(tokenizer: PreTrainedTokenizerFast) -> Dataset:
    """Return sentences of different lengths, labelled 1 if they praise."""
    sentences = [
        (f"{first} {noun} is {'not ' * negated}{'very ' * length}{word}", int((word in PRAISE) != negated))
        for first, noun, word in itertools.product(FIRST, NOUNS, PRAISE + BLAME)
        for negated, length in itertools.product((False, True), (0, 2))
    ]
    texts, labels = map(list, zip(*sentences, strict=True))
    return Dataset.from_dict({**tokenizer(texts), "label": labels})


def accuracy(output: Any, labels: torch.Tensor) -> dict[str, cp.MeanMetric]:
    """Return the fraction of right labels."""
    return {"accuracy": cp.MeanMetric(float((output.logits.argmax(1) == labels).sum()), len(labels))}


def main(arguments: list[str] | None = None) -> float:
    """Train, and return the accuracy on held-out sentences."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="data(2)")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)  # the same initial weights in every process
    tokenizer = build_tokenizer()
    parts = build_dataset(tokenizer).train_test_split(0.2, seed=0)
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), options.dropout)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **sizes, **rates))
    collator = DataCollatorWithPadding(tokenizer)
    loader = DataLoader(parts["train"], batch_size=32, shuffle=True, collate_fn=collator)
    held_out = DataLoader(parts["test"], batch_size=32, collate_fn=collator)
    optimizer = partial(torch.optim.AdamW, lr=2e-3)
    with cp.Trainer(model, loss=lambda out, _: out.loss, optimizer=optimizer, strategy=options.strategy) as trainer:
        history = trainer.fit(loader, epochs=options.epochs, eval_dataset=held_out, metrics=accuracy)
    result = history.evaluations[-1].metrics["accuracy"]
    if trainer.rank == 0:
        print(f"{options.strategy}: {result:.0%} of the held-out sentences are right")
    return result


if __name__ == "__main__":
    main()
