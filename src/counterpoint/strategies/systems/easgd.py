"""Elastic averaging SGD: workers that update apart, and a center that all are drawn to."""

from __future__ import annotations

from counterpoint.errors import PlanError
from counterpoint.strategies.easgd import ElasticAveraging
from counterpoint.strategies.strategy import Strategy

DEFAULT_BETA = 0.9
"""What all workers together are drawn by, where nothing else is said."""


def easgd(
    degree: int, *, servers: int = 1, tau: int = 10, alpha: float = 0.0, rho: float = 0.0, eta: float = 0.0
) -> tuple[Strategy, ...]:
    """Return asynchronous Elastic Averaging SGD: workers update apart and are drawn to a center every tau steps.

    The worker's update is that of its own optimizer. With ``SGD(lr, momentum=0.99, nesterov=True)`` it is EAMSGD, but
    for what is drawn: torch keeps the weights at which the next gradient is taken, a step of momentum ahead of the
    paper's.

    Args:
        degree: number of workers along the new axis.
        servers: ranks that keep the center.
        tau: a worker talks to the center after so many of its steps.
        alpha: how far a worker and the center are drawn; by default eta times rho, or 0.9 divided by the workers.
        rho: how much of it the paper's objective asks for, with eta.
        eta: the workers' learning rate, with rho.

    Promise:
        What elastic promises: the journal of meetings plays back exactly; the model is the center.

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
    """Return how far one of so many workers is drawn, as a plan writes it.

    Raises:
        PlanError: it is further than where the others are.
    """
    found = alpha or DEFAULT_BETA / degree
    if not 0 < found < 1:
        raise PlanError(
            f"alpha={found:g} of {system} draws a worker no way or past the center; give alpha between 0 and 1, {DEFAULT_BETA} "
            "divided by the number of workers, for one"
        )
    return f"{found:.12f}".rstrip("0")


UNSUPPORTED_IN_EASGD = {
    "beta": f"alpha is beta divided by the number of workers; give alpha=, or nothing for beta={DEFAULT_BETA}",
    "delta": "momentum is the optimizer's; pass SGD(lr, momentum=0.99, nesterov=True) to Trainer",
}
