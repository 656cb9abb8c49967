"""Elastic averaging SGD, with the options of its paper."""

from __future__ import annotations

from counterpoint.errors import PlanError
from counterpoint.strategies.easgd import ElasticAveraging
from counterpoint.strategies.strategy import Strategy

DEFAULT_BETA = 0.9
"""Default of beta, the sum of the moving rates of all workers."""


def easgd(
    degree: int, *, servers: int = 1, tau: int = 10, alpha: float = 0.0, rho: float = 0.0, eta: float = 0.0
) -> tuple[Strategy, ...]:
    """Return asynchronous Elastic Averaging SGD: workers exchange weights with a center every tau steps.

    A worker updates with its own optimizer. With ``SGD(lr, momentum=0.99, nesterov=True)`` it is EAMSGD, except for
    which weights are exchanged: torch stores the weights at which the next gradient is computed, one momentum step
    ahead of the paper's.

    Args:
        degree: number of workers along the new axis.
        servers: number of ranks that keep the center.
        tau: communication period: steps of a worker between two exchanges.
        alpha: moving rate; by default eta times rho, or 0.9 divided by the number of workers.
        rho: penalty of the paper's objective, with eta.
        eta: the workers' learning rate, with rho.

    Promise:
        The journal of exchanges can be replayed exactly; the trained model is the center.

    Cost:
        Bytes sent per step: in every tau-th step each worker its weights once, each server its weights once per
        worker. Memory: optimizer state on every worker, the center on the servers.

    Source:
        Zhang et al., Deep Learning with Elastic Averaging SGD, NIPS 2015, algorithms 1 and 2.
    """
    if (rho > 0) != (eta > 0) or (alpha and rho):
        raise PlanError(
            f"alpha={alpha:g}, rho={rho:g}, eta={eta:g} of easgd: alpha is eta times rho; give alpha, or both of the "
            "others, or none"
        )
    return (ElasticAveraging(degree, servers, format_alpha("easgd", degree, alpha or eta * rho), tau),)


def format_alpha(system: str, degree: int, alpha: float) -> str:
    """Return the moving rate of one worker as decimal digits.

    Raises:
        PlanError: it is not between 0 and 1.
    """
    rate = alpha or DEFAULT_BETA / degree
    if not 0 < rate < 1:
        raise PlanError(
            f"alpha={rate:g} of {system} is not between 0 and 1; give alpha={DEFAULT_BETA} divided by the "
            "number of workers, for example"
        )
    return f"{rate:.12f}".rstrip("0")


UNSUPPORTED_IN_EASGD = {
    "beta": f"alpha is beta divided by the number of workers; give alpha=, or neither for beta={DEFAULT_BETA}",
    "delta": "momentum is the optimizer's; pass SGD(lr, momentum=0.99, nesterov=True) to Trainer",
}
