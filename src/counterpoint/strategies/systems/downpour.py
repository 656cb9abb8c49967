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
    """Return Downpour SGD: workers push gradients to servers that update at once, and fetch weights now and then.

    A minibatch of a worker is a microbatch here, and a step has n_push of them: their gradient is pushed as one.
    Weights stay as they were fetched until they are fetched again; the paper's pseudo-code moves them by the worker's
    own gradients meanwhile, and its experiments have n_push = n_fetch = 1. The optimizer on the servers is the
    trainer's, and the paper's is Adagrad: pass ``optimizer=torch.optim.Adagrad``; another one is warned about.

    Args:
        degree: number of workers along the new axis.
        servers: ranks that keep weights.
        n_push: minibatches whose gradient is pushed as one: the microbatches of the plan.
        n_fetch: minibatches after which weights are fetched, a multiple of n_push; n_push by default.

    Promise:
        What asp promises. What is pushed is the gradient of the mean over the n_push minibatches, where the paper adds
        them up: multiply the learning rate by n_push for the same. With Adagrad there is no difference.

    Cost:
        Bytes sent per n_push minibatches: each worker its gradients once; each server its weights once per worker and
        n_fetch minibatches. Optimizer state only on the servers.

    Source:
        Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 4.1 and appendix.
    """
    fetch = n_fetch or n_push
    if fetch < 1 or fetch % n_push:
        raise PlanError(
            f"n_push={n_push}, n_fetch={n_fetch} of downpour: a worker fetches where it pushes, so that each gradient "
            f"is taken at one version of the weights; give n_fetch={n_push} or a multiple of it"
        )
    return (Server(degree, servers, "asp", fetch_every=fetch // n_push),)


UNSUPPORTED_IN_DOWNPOUR = {
    "n_replicas": "the number of workers stands first; write downpour(4)",
    "learning_rate": "it is the optimizer's; pass optimizer=functools.partial(torch.optim.Adagrad, lr=...) to Trainer",
}


def project_adam(degree: int, *, servers: int = 1) -> tuple[Strategy, ...]:
    """Return Project Adam's asynchronous updates: no worker waits for another, and no lock is taken for the weights.

    There, threads of one machine change weights in shared memory without locks, and machines push to servers. Here both
    are one: every worker is a rank with weights of its own, and the one copy that all change is the servers'. So an
    update is never torn: a server applies one push of a unit after the other, and a worker reads a unit between two of
    them, but two units as they were at different moments. Nothing waits for a lock there, nor here; here the order of
    updates is known as well, and plays back.

    Args:
        degree: number of workers along the new axis.
        servers: ranks that keep weights.

    Promise:
        What asp promises, and no more: no bound on staleness, no version that all units have in common.

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
    "threads": "every worker is a rank; write project_adam(4), and counterpoint run --bind=core for one on each core",
    "stragglers": "every sample counts in every epoch, and the end of one waits for all workers; leave it out",
}
