"""LARS and LAMB as their papers write them, one parameter at a time, in plain float64."""

import math
from collections.abc import Mapping

from torch import Tensor

State = dict[str, Tensor]


def lars(w: Tensor, g: Tensor, state: State, options: Mapping[str, float]) -> Tensor:
    """You, Gitman and Ginsburg 2017, algorithm 1, with the rate of equation 6; Nesterov's momentum as in SGD."""
    lr, trust, decay, m = (options[key] for key in ("lr", "trust_coefficient", "weight_decay", "momentum"))
    size, slope = float(w.norm()), float(g.norm())
    local = trust * size / (slope + decay * size + options["eps"]) if size and slope else 1.0
    if options["excluded"]:
        local, decay = 1.0, 0.0
    step = lr * local * (g + decay * w)
    state["v"] = m * state.get("v", 0 * w) + step
    return w - (m * state["v"] + step if options["nesterov"] else state["v"])


def lamb(w: Tensor, g: Tensor, state: State, options: Mapping[str, float]) -> Tensor:
    """You et al. 2020, algorithm 2, with phi the norm within two bounds."""
    beta1, beta2, decay = (options[key] for key in ("beta1", "beta2", "weight_decay"))
    state["t"] = t = state.get("t", w.new_zeros(())) + 1
    state["m"] = beta1 * state.get("m", 0 * w) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0 * w) + (1 - beta2) * g * g
    c1, c2 = (1 - beta1 ** float(t), 1 - beta2 ** float(t)) if options["bias_correction"] else (1.0, 1.0)
    r = state["m"] / c1 / ((state["v"] / c2).sqrt() + options["eps"])
    if options["excluded"]:
        return w - options["lr"] * r
    r = r + decay * w
    phi = min(max(float(w.norm()), options["least"]), options["most"])
    ratio = phi / float(r.norm()) if float(w.norm()) and float(r.norm()) else 1.0
    return w - options["lr"] * ratio * r


FREE = {"least": 0.0, "most": math.inf}
