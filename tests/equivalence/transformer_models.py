"""Models of transformers, built from small configs and used as they are: what each is called with, and its steps."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import optim

import counterpoint as cp
from counterpoint.program.instruction import Forward
from counterpoint.testing.parity import relative_difference

SAMPLES, LENGTH, TOKENS, STEPS = 8, 6, 19, 5
SGD = partial(optim.SGD, lr=0.05, momentum=0.9)
ADAMW = partial(optim.AdamW, lr=1e-2, weight_decay=0.1)
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True)
class ModelFamily:
    """A family of models.

    A bias of keys has no gradient but rounding, since a softmax does not see it, and AdamW makes steps of full length
    of that: models with such a bias are trained with SGD.
    """

    model: str
    config: str
    options: dict[str, Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    make_optimizer: Any = SGD
    quiet: dict[str, Any] = field(default_factory=dict)


def tokens(length=LENGTH):
    return torch.randint(0, TOKENS, (SAMPLES, length))


def padded():
    """Every sample ends with another number of tokens that are none."""
    lengths = torch.arange(SAMPLES) % 3 + LENGTH - 2
    return {"input_ids": tokens(), "attention_mask": (torch.arange(LENGTH) < lengths[:, None]).long()}


KINDS = {
    "gpt2": ModelFamily(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": TOKENS, "n_positions": 8, "n_embd": 16, "n_layer": 3, "n_head": 4,
         "bos_token_id": None, "eos_token_id": None},
        lambda: {"input_ids": tokens()},
        quiet={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": False},
    ),
    "llama": ModelFamily(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**SMALL, "num_key_value_heads": 2, "vocab_size": TOKENS, "max_position_embeddings": 8,
         "attention_dropout": 0.1, "bos_token_id": None, "eos_token_id": None},
        padded,
        ADAMW,
    ),
    "bert": ModelFamily(
        "BertForMaskedLM",
        "BertConfig",
        {**SMALL, "vocab_size": TOKENS, "max_position_embeddings": 8},
        padded,
    ),
    "t5": ModelFamily(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": TOKENS, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4},
        lambda: {**padded(), "decoder_input_ids": tokens(LENGTH - 1)},
        ADAMW,
    ),
    "vit": ModelFamily(
        "ViTForImageClassification",
        "ViTConfig",
        {**SMALL, "image_size": 8, "patch_size": 4, "num_channels": 2, "num_labels": TOKENS,
         "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
        lambda: {"pixel_values": torch.randn(SAMPLES, 2, 8, 8)},
    ),
}  # fmt: skip


def build(name, **options):
    """Return a model in float64, the same one every time; biases begin with random numbers, not with zeros."""
    import transformers  # takes seconds, which collecting these tests should not

    kind = KINDS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = getattr(transformers, kind.config)(**{**kind.options, **options})
        model = getattr(transformers, kind.model)(config).double().train()
        for param in model.parameters():
            if not param.count_nonzero():
                param.detach().normal_(std=0.02)
    return model


def batches(name):
    """Return the inputs and the targets of every step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        result = []
        for _ in range(STEPS):
            inputs = {key: value.double() if value.is_floating_point() else value
                      for key, value in KINDS[name].inputs().items()}  # fmt: skip
            shape = inputs.get("decoder_input_ids", inputs.get("input_ids", torch.zeros(SAMPLES))).shape
            result.append((inputs, torch.randint(0, TOKENS, shape)))
        return result


def loss(output, targets):
    """The cross entropy of the logits of a model's output, whatever else stands in it."""
    return F.cross_entropy(output["logits"].flatten(0, -2), targets.flatten())


def train(name, strategy, micros=4):
    """Return the parameters and the losses of the steps under a plan with so many microbatches in all."""
    model = build(name)
    plan = cp.Plan.parse(strategy)
    plan = cp.Plan(plan.strategies, micros // plan.global_num_microbatches)
    with cp.parallelize(model, KINDS[name].make_optimizer, loss, strategy=plan) as step:
        losses = [step(*batch) for batch in batches(name)]
    return {key: param.detach() for key, param in model.named_parameters()}, losses


alone = cache(partial(train, strategy="solo"))


def count_stages(step, model):
    """Return the parameters of each stage by name."""
    compiled, named = step.local_ranks.compiled, dict(model.named_parameters())
    blocks = [
        {instruction.block for instruction in rank_program.body if isinstance(instruction, Forward)}
        for rank_program in compiled.program.rank_programs
    ]
    return [{key: named[key] for block in sorted(own) for key in compiled.model.blocks[block].params} for own in blocks]


def max_error(name, strategy):
    """Return the largest relative difference of any parameter or loss from those of the model alone."""
    params, losses = train(name, strategy)
    theirs, their_losses = alone(name)
    return max(
        *(relative_difference(params[key], value) for key, value in theirs.items()),
        *(abs(mine / other - 1) for mine, other in zip(losses, their_losses, strict=True)),
    )
