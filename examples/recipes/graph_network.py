"""Graph network: every rank has the whole graph, and the nodes of a batch are divided among the ranks.

python examples/recipes/graph_network.py --strategy "data(2)"
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import counterpoint as cp

NUM_NODES, NUM_CLASSES = 240, 4


class GraphNetwork(nn.Module):
    """Two graph convolutions (Kipf and Welling, ICLR 2017)."""

    def __init__(self, num_features: int, hidden: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(num_features, hidden), nn.Linear(hidden, NUM_CLASSES)

    def forward(self, nodes: Tensor, features: Tensor, adjacency: Tensor) -> Tensor:
        """Return the logits of some nodes."""
        hidden = F.relu(adjacency @ self.first(features))
        return (adjacency @ self.second(hidden))[nodes]


def make_graph() -> tuple[Tensor, Tensor, Tensor]:
    """Return noisy features, the normalized adjacency matrix and the classes of nodes in communities."""
    generator = torch.Generator().manual_seed(1)
    classes = torch.arange(NUM_NODES) % NUM_CLASSES
    likelihood = torch.where(classes[:, None] == classes, 0.15, 0.01)
    upper = (torch.rand(NUM_NODES, NUM_NODES, generator=generator) < likelihood).to(likelihood.dtype).triu(1)
    adjacency = upper + upper.T + torch.eye(NUM_NODES)
    scale = adjacency.sum(1).rsqrt()
    features = F.one_hot(classes, 8) + 2 * torch.randn(NUM_NODES, 8, generator=generator)
    return features, scale[:, None] * adjacency * scale, classes


def main(arguments: list[str] | None = None) -> tuple[list[float], float]:
    """Train on half of the nodes, and return the losses and the accuracy on the others."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="data(2)")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    features, adjacency, classes = make_graph()
    train, held_out = torch.arange(NUM_NODES).chunk(2)
    model = GraphNetwork(features.shape[1])
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4), []
    with cp.parallelize(
        model, optimizer, F.cross_entropy, strategy=options.strategy, shared=("features", "adjacency")
    ) as step:
        for _ in range(options.epochs):
            batches = train[torch.randperm(len(train))].split(40)
            losses += [step((nodes, features, adjacency), classes[nodes]) for nodes in batches]
    with torch.no_grad():
        correct = model(held_out, features, adjacency).argmax(1) == classes[held_out]
    print(f"{options.strategy}: loss {losses[-1]:.4f}, {correct.double().mean():.1%} of the held-out nodes")
    return losses, float(correct.double().mean())


if __name__ == "__main__":
    main()
