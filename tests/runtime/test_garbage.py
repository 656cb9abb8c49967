"""What a step frees is freed at once, and does not wait for the garbage collector."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp

PLANS = [
    "solo", "data(2)", "tree(2)", "zero(2, level=1)", "zero(2, level=2)", "zero(2, level=3)", "pipeline(2)",
    "pipeline(2, schedule=gpipe)", "pipeline(2, schedule=zero_bubble)", "pipeline(2) * data(2)", "pipedream(2)",
    "tensor(2)", "server(2)", "asp(2)", "easgd(2)", "data(2, compress=topk)",
]  # fmt: skip


class Classifier(nn.Module):
    """Has a layer of each kind that a gradient sink or a replaced function is for."""

    def __init__(self):
        super().__init__()
        self.embed, self.drop = nn.Embedding(16, 8), nn.Dropout(0.1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4))
        self.head = nn.Linear(8, 5)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + self.drop(layer(x))
        return self.head(x.mean(1))


def find_tensors():
    """The shapes of all tensors that the garbage collector knows, by identity."""
    return {id(found): tuple(found.shape) for found in gc.get_objects() if issubclass(type(found), torch.Tensor)}


@pytest.mark.long(quick=["pipeline(2)"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_step_leaves_no_tensor_to_the_garbage_collector(plan):
    """The inputs and the gradients of every microbatch of a last stage were kept until the collector ran."""
    torch.manual_seed(0)
    model = Classifier()
    step = cp.parallelize(model, optim.AdamW(model.parameters()), F.cross_entropy, strategy=plan, num_microbatches=2)
    batch = torch.randint(16, (16, 3)), torch.randint(5, (16,))
    with step:
        for _ in range(4):
            step(*batch)
        gc.collect()
        gc.disable()
        try:
            earlier = find_tensors()  # also of the model of another test, which may become garbage now
            for _ in range(3):
                step(*batch)
            before = find_tensors()
            gc.collect()
            after = find_tensors()
        finally:
            gc.enable()
    assert not [shape for key, shape in before.items() if key not in after and key not in earlier]
