"""DistBelief's Downpour SGD, and Project Adam."""

from __future__ import annotations

from counterpoint.errors import PlanError
from counterpoint.strategies.options import MicrobatchCount
from counterpoint.strategies.parameter_server import Server
from counterpoint.strategies.strategy import Strategy

EVERY_STEP = MicrobatchCount(1)


def downpour(
    degree: int, *, servers: int = 1, n_push: MicrobatchCount = EVERY_STEP, n_fetch: int = 0
) -> tuple[Strategy, ...]:
    """Return Downpour SGD: workers push gradients to servers, which update immediately, and fetch weights periodically.

    A minibatch of a worker is a microbatch here, and a step has n_push of them, with one push. Fetched weights do not
    change until the next fetch; the paper's pseudo-code also applies the worker's own gradients to them, and its
    experiments have n_push = n_fetch = 1. The optimizer on the servers is the trainer's, and the paper's is Adagrad:
    pass ``optimizer=torch.optim.Adagrad``; there is a warning for another one.

    Args:
        degree: number of workers along the new axis.
        servers: number of ranks that keep weights.
        n_push: number of minibatches per push: the microbatches of the plan.
        n_fetch: number of minibatches between fetches, a multiple of n_push; n_push by default.

    Promise:
        As asp. The gradient of the mean over the n_push minibatches is pushed, where the paper pushes the sum: multiply
        the learning rate by n_push for the same. With Adagrad there is no difference.

    Cost:
        Bytes sent per n_push minibatches: each worker its gradients once; each server its weights once per worker and
        n_fetch minibatches. Optimizer state only on the servers.

    Source:
        Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 4.1 and appendix.
    """
    fetch = n_fetch or n_push
    if fetch < 1 or fetch % n_push:
        raise PlanError(
            f"n_push={n_push}, n_fetch={n_fetch} of downpour: a worker fetches when it pushes, so that each gradient "
            "is "
            f"computed with one version of the weights; give n_fetch={n_push} or a multiple of it"
        )
    return (Server(degree, servers, "asp", pull_every=fetch // n_push),)


UNSUPPORTED_IN_DOWNPOUR = {
    "n_replicas": "the number of workers is the first argument; write downpour(4)",
    "learning_rate": "it is the optimizer's; pass optimizer=functools.partial(torch.optim.Adagrad, lr=...) to Trainer",
}


def project_adam(degree: int, *, servers: int = 1) -> tuple[Strategy, ...]:
    """Return Project Adam's asynchronous updates: workers do not wait for each other, and weights have no locks.

    In Project Adam threads of one machine update weights in shared memory without locks, and machines push to servers.
    Here every worker is a rank with its own weights, and the shared copy is on the servers. A server applies the pushes
    of a unit one after the other, and a worker reads a unit between two of them, so that no update is torn; two units
    may be read at different versions. The order of updates is recorded and can be replayed.

    Args:
        degree: number of workers along the new axis.
        servers: number of ranks that keep weights.

    Promise:
        As asp: no bound on staleness, and no version across all units.

    Cost:
        Bytes sent per step: each worker its gradients once; each server its weights once per worker. Project Adam sends
        activations and errors of fully connected layers instead, and multiplies them on the server; here gradients are
        sent, and ``server(n, consistency=asp, compress=...)`` makes them smaller.

    Source:
        Chilimbi et al., Project Adam: Building an Efficient and Scalable Deep Learning Training System, OSDI 2014;
        Recht et al., Hogwild, NIPS 2011.
    """
    return (Server(degree, servers, "asp"),)


UNSUPPORTED_IN_PROJECT_ADAM = {
    "threads": "every worker is a rank; write project_adam(4), and counterpoint run --bind=core for one per core",
    "stragglers": "every sample is used in every epoch, whose end waits for all workers; drop it",
}
