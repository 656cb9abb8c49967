"""Actor and critic: two models that read each other between steps, on a toy environment.

python examples/recipes/actor_critic.py --strategy "zero3(2)"
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

import counterpoint as cp

SIZE, NUM_ENVIRONMENTS, NUM_MOVES, DISCOUNT = 5, 32, 8, 0.9


class GridWorld:
    """Many squares of ``SIZE`` x ``SIZE`` fields at once; a reward of 1 for each move that ends in the middle."""

    def __init__(self) -> None:
        self.places = torch.randint(SIZE, (NUM_ENVIRONMENTS, 2))

    def observe(self) -> Tensor:
        """Return the places as one-hot vectors."""
        return F.one_hot(self.places[:, 0] * SIZE + self.places[:, 1], SIZE * SIZE).to(torch.get_default_dtype())

    def move(self, actions: Tensor) -> Tensor:
        """Move right, left, up or down; return the rewards."""
        directions = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
        self.places = (self.places + directions[actions]).clamp(0, SIZE - 1)
        return (self.places == SIZE // 2).all(1).to(torch.get_default_dtype())


def policy_loss(logits: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    """Return the policy gradient's loss with a bonus for entropy, a mean over samples."""
    (actions, advantages), policy = targets, Categorical(logits=logits)
    return -(policy.log_prob(actions) * advantages + 0.01 * policy.entropy()).mean()


@torch.no_grad()
def play(world: GridWorld, actor: nn.Module, critic: nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Return observations, actions, advantages and returns of some moves."""
    steps, rewards = [], []
    for _ in range(NUM_MOVES):
        observed = world.observe()
        steps.append((observed, Categorical(logits=actor(observed)).sample()))
        rewards.append(world.move(steps[-1][1]))
    total, returns = critic(world.observe())[:, 0], []
    for reward in reversed(rewards):
        returns.insert(0, total := reward + DISCOUNT * total)
    observed, actions, returns = (torch.cat(values) for values in (*zip(*steps, strict=True), returns))
    return observed, actions, returns - critic(observed)[:, 0], returns, float(torch.stack(rewards).mean())


def main(arguments: list[str] | None = None) -> list[float]:
    """Train both models, and return the mean reward of every round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="data(2)")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)  # the same weights and the same moves in every process
    actor, critic = (nn.Sequential(nn.Linear(25, 64), nn.Tanh(), nn.Linear(64, size)) for size in (4, 1))
    world, rewards, adam = GridWorld(), [], partial(torch.optim.Adam, lr=0.01)
    train_actor = cp.parallelize(actor, adam, policy_loss, strategy=options.strategy)
    train_critic = cp.parallelize(critic, adam, F.mse_loss, strategy=options.strategy)
    with train_actor, train_critic:
        for _ in range(options.rounds):
            with train_actor.full_weights(), train_critic.full_weights():
                observed, actions, advantages, returns, reward = play(world, actor, critic)
            train_actor(observed, (actions, advantages))
            train_critic(observed, returns[:, None])
            rewards.append(reward)
    print(f"{options.strategy}: mean reward {rewards[0]:.3f} in the first round, {rewards[-1]:.3f} in the last")
    return rewards


if __name__ == "__main__":
    main()
