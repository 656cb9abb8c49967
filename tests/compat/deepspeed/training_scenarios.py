"""Training by forward, backward and step, each way as a scenario on this rank; and the same by one plain loop."""

from typing import Any

import torch
from torch import nn

import counterpoint.compat.deepspeed as deepspeed
from counterpoint.compat.deepspeed.start import open_fabric
from counterpoint.errors import CounterpointError
from counterpoint.optim.lamb import LAMB

WIDE = torch.float64
STEPS, MICROBATCHES, ROWS = 4, 2, 3
ADAMW = {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}}
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}
CYCLE = {
    "type": "OneCycle",
    "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 2, "cycle_momentum": False},
}


class Net(nn.Module):
    """Layers of which one is frozen, one is used twice, and one is not used."""

    def __init__(self, dtype=WIDE):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.same = nn.Linear(5, 7, dtype=WIDE), nn.Linear(7, 7, dtype=WIDE)
        self.frozen, self.unused = nn.Linear(7, 7, dtype=WIDE), nn.Linear(3, 3, dtype=WIDE)
        self.last = nn.Linear(7, 3, dtype=WIDE)
        self.frozen.requires_grad_(False)
        self.to(dtype)

    def forward(self, x):
        return self.last(self.frozen(self.same(self.same(torch.tanh(self.first(x))))))


def batch(rank, step, microbatch):
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + microbatch)
    inputs = torch.randn(ROWS, 5, generator=generator, dtype=WIDE)
    return inputs, torch.randint(0, 3, (ROWS,), generator=generator)


def config_of(stage=0, optimizer=None, **sections) -> dict[str, Any]:
    given = {} if optimizer is None else {"optimizer": optimizer}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICROBATCHES,
        "zero_optimization": {"stage": stage},
        **given,
        **sections,
    }


def values(model):
    return torch.cat([param.detach().double().flatten() for param in model.parameters()]).tolist()


def loop(engine, steps, rank):
    """Train as a script of DeepSpeed's; return the norm of each step."""
    norms = []
    for step in steps:
        for microbatch in range(engine.gradient_accumulation_steps()):
            inputs, targets = batch(rank, step, microbatch)
            loss = nn.functional.cross_entropy(engine(inputs.to(engine.frozen.weight.dtype)), targets)
            engine.backward(loss)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def train(config, make=None, steps=range(STEPS)):
    """Return the parameters after the steps, and the norms of the gradients."""
    model = Net()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=groups_of(model) if make == "groups" else None, config=config
    )
    norms = loop(engine, steps, open_fabric().rank)
    return [values(model), norms]


def groups_of(model):
    return [
        {"params": [*model.first.parameters(), *model.same.parameters()], "lr": 0.02},
        {"params": [*model.last.parameters()]},
    ]


def alone(num_ranks, *, make, clip=None, schedule=None, steps=STEPS):
    """Train as a plain loop does on the samples of all ranks; return the parameters and the norms."""
    model, norms = Net(), []
    optimizer = make(model)
    for step in range(steps):
        parts = [batch(rank, step, micro) for rank in range(num_ranks) for micro in range(MICROBATCHES)]
        inputs, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        optimizer.zero_grad()
        for param in model.unused.parameters():
            param.grad = torch.zeros_like(param)
        if schedule is not None:
            optimizer.param_groups[0]["lr"] = schedule[step]
        nn.functional.cross_entropy(model(inputs), targets).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip if clip is not None else 1e9)))
        optimizer.step()
    return [values(model), norms]


def adamw(model):
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.05, weight_decay=0.1)


def sgd(model):
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9, nesterov=True)


def adamw_of_groups(model):
    return torch.optim.AdamW(groups_of(model), lr=0.05, weight_decay=0.1)


# What a scenario gives to initialize, and what the plain loop does.
REFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adamw": ({"optimizer": ADAMW}, {"make": adamw}),
    "sgd clipped": ({"optimizer": SGD, "gradient_clipping": 0.2}, {"make": sgd, "clip": 0.2}),
    "groups": ({"optimizer": ADAMW}, {"make": adamw_of_groups}),
    "schedule": ({"optimizer": SGD, "scheduler": CYCLE}, {"make": sgd, "schedule": [0.01, 0.055, 0.1, 0.055]}),
}
STAGES = (0, 1, 2)


def train_all():
    """Return the result of each reference at each stage."""
    return {
        f"{name} at stage {stage}": train(config_of(stage, **sections), make=name)
        for name, (sections, _) in REFERENCES.items()
        for stage in STAGES
    }


def state_sizes():
    """Return the numbers that AdamW keeps on this rank at each stage, and those of all trained parameters."""
    sizes = []
    for stage in STAGES:
        model = Net()
        engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config_of(stage, ADAMW))
        loop(engine, range(1), open_fabric().rank)
        sizes.append(sum(state["exp_avg"].numel() for state in optimizer.state.values()))
    return [*sizes, sum(param.numel() for param in model.parameters() if param.requires_grad)]


def started_from_other_weights():
    """Return the parameters after initialize, of a model that was made with another seed on each rank."""
    model = Net()
    with torch.no_grad():
        model.first.weight += open_fabric().rank
    deepspeed.initialize(model=model, config=config_of(1, SGD))
    return values(model)


def in_half(section, stage):
    """Return the parameters of a float32 model that computes in bf16 or fp16, and the steps that were skipped."""
    model = Net(torch.float32)
    config = config_of(stage, {"type": "SGD", "params": {"lr": 0.1}}, **section)
    engine, _, _, _ = deepspeed.initialize(model=model, config=config)
    loop(engine, range(2), open_fabric().rank)
    return [values(model), engine.skipped_steps, engine.scaler.scale]


def save_in_between(folder, stage):
    """Train two steps, save, and train two more; return the parameters."""
    model = Net()
    engine, _, _, _ = deepspeed.initialize(model=model, config=config_of(stage, ADAMW, scheduler=CYCLE))
    rank = open_fabric().rank
    loop(engine, range(2), rank)
    engine.save_checkpoint(folder, client_state={"epoch": 3, "order": torch.arange(2)})
    loop(engine, range(2, 4), rank)
    return values(model)


def load_and_continue(folder, stage):
    """Load into another model, and train the last two steps on the samples of two ranks; return the parameters."""
    fabric = open_fabric()
    microbatches = MICROBATCHES * 2 // fabric.num_ranks
    config = config_of(stage, ADAMW, scheduler=CYCLE) | {"gradient_accumulation_steps": microbatches}
    model = Net()
    with torch.no_grad():
        model.last.weight.zero_()
    engine, _, _, _ = deepspeed.initialize(model=model, config=config)
    path, client_state = engine.load_checkpoint(folder)
    assert str(path).endswith("global_step2")
    assert client_state["epoch"] == 3
    for step in range(2, 4):
        for index in range(microbatches):
            rank = fabric.rank if fabric.num_ranks > 1 else index // MICROBATCHES
            inputs, targets = batch(rank, step, index % MICROBATCHES)
            engine.backward(nn.functional.cross_entropy(engine(inputs), targets))
            engine.step()
    return values(model)


def all_in_half():
    """Return what each precision comes to at stages 0 and 2."""
    bf16, fp16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 128}}
    autocast = {"torch_autocast": {"enabled": True}}
    too_large = {"fp16": {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}}
    return {
        "bf16": [in_half(bf16, stage) for stage in (0, 2)],
        "fp16": [in_half(fp16, stage) for stage in (0, 2)],
        "autocast": [in_half(autocast, stage) for stage in (0, 2)],
        "scale of 2**30": [in_half(too_large, stage) for stage in (0, 2)],
    }


def refused():
    """Return the error of everything that several ranks cannot do."""

    def initialize(stage, optimizer=None, **zero):
        model = Net()
        config = config_of(stage, ADAMW)
        config["zero_optimization"] |= zero
        made = None if optimizer is None else optimizer(model)
        return deepspeed.initialize(model=model, optimizer=made, config=config)[0]

    def with_state(model):
        optimizer = adamw(model)
        optimizer.state[model.last.weight] = {"step": torch.tensor(1.0)}
        return optimizer

    def init():
        with deepspeed.zero.Init():
            pass

    return {
        "stage 3": error_of(lambda: initialize(3)),
        "an optimizer of whole parameters": error_of(lambda: initialize(1, lambda m: LAMB(m.parameters(), lr=0.1))),
        "an optimizer with state": error_of(lambda: initialize(2, with_state)),
        "zero.Init": error_of(init),
        "an unused parameter": error_of(
            lambda: loop(initialize(2, ignore_unused_parameters=False), range(1), open_fabric().rank)
        ),
    }


def probe_and_drop(engine, optimizer):
    """Leave gradients in the parameters, as a generator's loss in the discriminator, and drop them."""
    engine(batch(0, 0, 0)[0]).sum().backward()
    optimizer.zero_grad()


def replace_data(engine, _):
    """Give each parameter other memory with the same values."""
    params = list(engine.parameters())
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params), params)


def set_rate_of_rank_1(_, optimizer):
    optimizer.param_groups[0]["lr"] = 0.05 + open_fabric().rank


def set_other_shape(engine, _):
    engine.unused.weight.data = torch.zeros(2, 2, dtype=WIDE)


def add_group(_, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


CHANGES = {
    "unfrozen": lambda engine, _: engine.frozen.requires_grad_(True),
    "frozen": lambda engine, _: engine.last.requires_grad_(False),
    "group added": add_group,
    "rates": set_rate_of_rank_1,
    "other shape": set_other_shape,
}
"""What a script does after initialize that is refused."""


def train_after_change(stage, change, steps=STEPS):
    """Return the parameters after steps, before each of which the script does something."""
    model = Net()
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config_of(stage, ADAMW))
    for step in range(steps):
        change(engine, optimizer)
        loop(engine, [step], open_fabric().rank)
    return values(model)


def change_grads(stage):
    """Clip the gradients of this rank before the step."""
    engine, *_ = deepspeed.initialize(model=Net(), config=config_of(stage, ADAMW))
    for microbatch in range(MICROBATCHES):
        inputs, targets = batch(0, 0, microbatch)
        engine.backward(nn.functional.cross_entropy(engine(inputs), targets))
        nn.utils.clip_grad_norm_(engine.parameters(), 0.1)
        engine.step()


def changed_by_scripts():
    """Return the parameters, or the error, after each change at each stage."""
    found = {}
    for stage in STAGES:
        found[f"probe at stage {stage}"] = train_after_change(stage, probe_and_drop)
        found[f"data at stage {stage}"] = train_after_change(stage, replace_data)
        found[f"shared at stage {stage}"] = train_two_engines(stage)
        found[f"gradients at stage {stage}"] = error_of(lambda stage=stage: change_grads(stage))
        for name, change in CHANGES.items():
            work = lambda stage=stage, change=change: train_after_change(stage, change, 1)  # noqa: E731
            found[f"{name} at stage {stage}"] = error_of(work)
    return found


def set_weights(stage, modifier_rank):
    """Set a weight on rank 1 inside ``GatheredParameters``, before a step; return the parameters."""
    model = Net()
    engine, *_ = deepspeed.initialize(model=model, config=config_of(stage, ADAMW))
    rank = open_fabric().rank
    loop(engine, range(1), rank)
    params = [model.last.bias, model.frozen.weight]
    with deepspeed.zero.GatheredParameters(params, modifier_rank=modifier_rank):
        if rank == 1:
            for param in params:
                param.data.fill_(0.5)
    loop(engine, range(1, STEPS), rank)
    return values(model)


def set_in_plain_loop(num_ranks):
    """Return the parameters of a plain loop after the same."""
    model = Net()
    optimizer = adamw(model)
    for step in range(STEPS):
        if step == 1:
            model.last.bias.data.fill_(0.5)
            model.frozen.weight.data.fill_(0.5)
        parts = [batch(rank, step, micro) for rank in range(num_ranks) for micro in range(MICROBATCHES)]
        inputs, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        model.zero_grad()
        for param in model.unused.parameters():
            param.grad = torch.zeros_like(param)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return values(model)


def set_outside(stage):
    """Set a weight on rank 1 without any context, before the first step."""
    model = Net()
    engine, *_ = deepspeed.initialize(model=model, config=config_of(stage, ADAMW))
    rank = open_fabric().rank
    if rank == 1:
        with torch.no_grad():
            model.last.weight += 1
    loop(engine, range(1), rank)


def weights_set():
    """Return what becomes of weights that rank 1 sets, at each stage."""
    found = {}
    for stage in STAGES:
        found[f"sent at stage {stage}"] = set_weights(stage, 1)
        found[f"kept at stage {stage}"] = error_of(lambda stage=stage: set_weights(stage, None))
        found[f"outside at stage {stage}"] = error_of(lambda stage=stage: set_outside(stage))
    found["no such rank"] = error_of(lambda: set_weights(0, 2))
    return found


def train_two_engines(stage):
    """Train one model by turns of two engines; return the parameters."""
    model = Net()
    engines = [deepspeed.initialize(model=model, config=config_of(stage, SGD))[0] for _ in range(2)]
    for step in range(STEPS):
        loop(engines[step % 2], [step], open_fabric().rank)
    return values(model)


def train_two_optimizers(num_ranks):
    """Train one model by turns of two optimizers in a plain loop; return the parameters."""
    model = Net()
    optimizers = [sgd(model), sgd(model)]
    for step in range(STEPS):
        parts = [batch(rank, step, micro) for rank in range(num_ranks) for micro in range(MICROBATCHES)]
        inputs, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizers[step % 2].step()
    return values(model)


class OwnAdamW(torch.optim.AdamW):
    """A class whose update is not known."""


def refused_by_initialize():
    """Return the error of each model, optimizer and configuration that two ranks cannot have."""
    rank = open_fabric().rank

    def initialize(model, make=None, stage=1, **sections):
        optimizer = None if make is None else make(model.parameters(), lr=0.1)
        config = config_of(stage, ADAMW) | sections
        deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def share():
        model = Net()
        model.unused.weight.data = model.last.weight.data.view(-1)[:9].view(3, 3)
        return model

    def expand():
        model = Net()
        model.register_buffer("ones", torch.ones(1).expand(3))
        return model

    rates = {"optimizer": {"type": "SGD", "params": {"lr": 0.1 + rank}}}
    return {
        "shared memory": error_of(lambda: initialize(share())),
        "expanded": error_of(lambda: initialize(expand())),
        "Adagrad": error_of(lambda: initialize(Net(), torch.optim.Adagrad)),
        "subclass": error_of(lambda: initialize(Net(), OwnAdamW)),
        "rates": error_of(lambda: initialize(Net(), **rates)),
        "clipping": error_of(lambda: initialize(Net(), gradient_clipping=0.5 + rank)),
        "stage": error_of(lambda: initialize(Net(), stage=rank)),
        "accumulation": error_of(lambda: initialize(Net(), gradient_accumulation_steps=1 + rank)),
        "classes": error_of(lambda: initialize(Net(), [torch.optim.SGD, torch.optim.AdamW][rank])),
        "groups": error_of(lambda: initialize(Net(), lambda params, lr: torch.optim.SGD(params, lr + rank))),
    }


def error_of(work):
    """Return the text of the error that something ends with."""
    try:
        work()
    except CounterpointError as error:
        return str(error)
    return "no error"
