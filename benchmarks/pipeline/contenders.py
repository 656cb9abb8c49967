"""Contenders, each used as its documentation recommends; each gets the whole batch and trains stages of one model."""

import itertools
import os

import torch
import torch.distributed as dist
from torch import nn, optim

import counterpoint as cp
from counterpoint.jobs.job import sequence_loss
from counterpoint.jobs.models import GPT, GPTShape

STAGES, MICROS, BATCH = 2, 4, 16
SHAPES = {
    "full": GPTShape(num_layers=6, width=256, head_dim=64, context=128, num_tokens=4096, dropout=0.0),
    "quick": GPTShape(num_layers=6, width=32, head_dim=16, context=16, num_tokens=64, dropout=0.0),
}


def build_model(shape):
    """Return GPT B of the data-parallel benchmark with an untied output layer, which torch's stages need."""
    torch.manual_seed(0)
    model = GPT(shape)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def make_optimizer(params):
    return optim.AdamW(params, lr=3e-4)


def draw_batch(shape, draw):
    """Return inputs and targets of one batch."""
    tokens = torch.randint(0, shape.num_tokens, (BATCH, shape.context + 1), generator=draw)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def rank_from_env():
    return int(os.environ.get("RANK", "0"))


class Counterpoint:
    """A pipeline of Counterpoint; ``pipedream(2) in 1`` uses one microbatch per batch."""

    def __init__(self, name, shape):
        strategy, _, micros = name.partition(" in ")
        micros = int(micros or MICROS)
        self.run = cp.parallelize(
            build_model(shape), make_optimizer, sequence_loss, strategy=strategy, num_microbatches=micros
        )

    def step(self, batch):
        return self.run(*batch)

    def drain_incoming(self):
        """Receive what the other rank has sent for the next step."""
        for fabric in self.run.local_ranks.world.fabrics:
            fabric.drain_incoming()

    def close(self):
        self.run.close()


class IdlePeer:
    """A contender that does nothing between its runs."""

    def drain_incoming(self):
        pass


class FirstStage(nn.Module):
    """The embeddings and some blocks."""

    def __init__(self, model, blocks):
        super().__init__()
        self.tok, self.pos, self.blocks = model.tok, model.pos, nn.ModuleList(blocks)

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x


class LaterStage(nn.Module):
    """Some blocks and, in the last stage, the norm and the output layer."""

    def __init__(self, model, blocks, *, is_last):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.end = nn.Sequential(model.norm, model.head) if is_last else nn.Identity()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.end(x)


STAGE_STARTS = {"one": [0, 4, 6], "loop": [0, 2, 3, 5, 6], "V": [0, 1, 3, 5, 6]}
"""First block of each stage: as even as whole blocks allow; the output layer and the loss count as 1.3 blocks."""


def split_into_stages(model, bounds):
    """Return the model as stages, split between blocks."""
    runs = [list(model.blocks[first:stop]) for first, stop in itertools.pairwise(bounds)]
    backs = [LaterStage(model, run, is_last=at == len(runs) - 2) for at, run in enumerate(runs[1:])]
    return [FirstStage(model, runs[0]), *backs]


class TorchPipeline(IdlePeer):
    """A schedule of torch.distributed.pipelining."""

    def __init__(self, name, shape):
        from torch.distributed import pipelining
        from torch.distributed.pipelining import schedules

        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        kind = getattr(schedules, f"Schedule{name}")
        chunks = 1 if issubclass(kind, schedules.PipelineScheduleSingle) else 2
        layout = "one" if chunks == 1 else "V" if name in {"ZBVZeroBubble", "DualPipeV"} else "loop"
        whole = split_into_stages(build_model(shape), STAGE_STARTS[layout])
        places = {
            "one": [self.rank],
            "loop": [self.rank, self.rank + STAGES],
            "V": [self.rank, 2 * STAGES - 1 - self.rank],
        }[layout]
        stages = [
            pipelining.PipelineStage(whole[place], place, STAGES * chunks, torch.device("cpu")) for place in places
        ]
        self.has_first, self.has_last = 0 in places, STAGES * chunks - 1 in places
        self.schedule = kind(stages[0] if chunks == 1 else stages, MICROS, loss_fn=sequence_loss)
        self.optimizer = make_optimizer([param for place in places for param in whole[place].parameters()])

    def step(self, batch):
        inputs, targets = batch
        self.optimizer.zero_grad()
        losses = []
        arguments = (inputs,) if self.has_first else ()
        options = {"target": targets, "losses": losses} if self.has_last else {}
        self.schedule.step(*arguments, **options)
        self.optimizer.step()
        loss = torch.stack(losses).mean() if losses else torch.zeros(())
        return loss.item()

    def close(self):
        dist.destroy_process_group()


class StagesAlone(IdlePeer):
    """A stage of torch's pipelines that never waits: both run at once, and random numbers replace what they would send.

    The mean of both times is that of a pipeline without bubbles and messages whose stages are even.
    """

    def __init__(self, _, shape):
        self.is_first = rank_from_env() == 0
        self.stage = split_into_stages(build_model(shape), STAGE_STARTS["one"])[0 if self.is_first else 1]
        self.optimizer = make_optimizer(self.stage.parameters())
        self.sent = torch.randn(BATCH // MICROS, shape.context, shape.width)

    def step(self, batch):
        self.optimizer.zero_grad()
        losses = []
        for inputs, targets in zip(*(part.split(BATCH // MICROS) for part in batch), strict=True):
            if self.is_first:
                self.stage(inputs).backward(self.sent)
                continue
            loss = sequence_loss(self.stage(self.sent.clone().requires_grad_()), targets) / MICROS
            loss.backward()
            losses.append(loss.item())
        self.optimizer.step()
        return sum(losses)

    def close(self):
        pass


class DeepSpeed(IdlePeer):
    """DeepSpeed's pipeline, 1F1B."""

    def __init__(self, _, shape):
        import deepspeed
        from deepspeed.pipe import PipelineModule

        deepspeed.init_distributed("gloo")
        model = build_model(shape)
        layers = [FirstStage(model, []), *(LaterStage(model, [block], is_last=False) for block in model.blocks)]
        layers.append(LaterStage(model, [], is_last=True))
        module = PipelineModule(layers, num_stages=STAGES, loss_fn=sequence_loss, partition_method="parameters")
        config = {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH // MICROS}
        config["gradient_clipping"] = 0.0  # its default of 1.0 would change the losses
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=make_optimizer(list(module.parameters())), config=config
        )

    def step(self, batch):
        parts = zip(*(part.split(BATCH // MICROS) for part in batch), strict=True)
        return float(self.engine.train_batch(iter(list(parts))))

    def close(self):
        dist.destroy_process_group()


class SingleProcess(IdlePeer):
    """A plain loop in one process: two ranks without bubbles would take half of its time."""

    def __init__(self, _, shape):
        self.model = build_model(shape)
        self.optimizer = make_optimizer(self.model.parameters())

    def step(self, batch):
        self.optimizer.zero_grad()
        loss = sequence_loss(self.model(batch[0]), batch[1])
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def close(self):
        pass
