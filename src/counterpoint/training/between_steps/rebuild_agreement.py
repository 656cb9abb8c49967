"""Changes between two steps for which all processes build their ranks again: made by all of them, or refused.

A process that has made such a change cannot know whether the others have. It announces the change on every connection
that a step uses, so that a rank which takes the step without it meets the announcement where it waits for this rank::

    rank 0   p.requires_grad_(False)   announce to 1, barrier in every group, exchange facts, build again
    rank 1   (nothing)                 takes the step: recv x1.0 from rank 0  ->  meets the announcement

A step without such a change costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

from torch import nn

from counterpoint.errors import PeerError, PlanError
from counterpoint.fabric.fabric import Fabric, Group, Json
from counterpoint.training.agreement.rank_facts import NamedFacts, describe_mode, describe_structure, first_difference

MAX_CHANGE = 100
"""Characters of a change in the label of a message, of which transports quote no more than 240 bytes."""
ANNOUNCEMENT = re.compile(r"rank (\d+)(?:, but its next message is| starts \w+ of) the change '([^']*)'")
"""In errors of transports, where ranks disagree on what comes next."""


def require_same_changes(fabric: Fabric, groups: Sequence[Group], model: nn.Module, change: str) -> None:
    """Check that all processes have made the same change; a collective call.

    Args:
        fabric: this rank's fabric.
        groups: of all ranks whose collectives a step runs, connected.
        model: this rank's model.
        change: what has changed, the same text on all ranks that have changed the same.

    Raises:
        PlanError: some have made no change, or another one: other parameters are trainable, or modules are in another
            mode.
    """
    everyone = tuple(range(fabric.num_ranks))
    label = f"the change '{change[:MAX_CHANGE].replace(chr(39), '')}'"
    facts = [*describe_structure(model)[0], ["the model", describe_mode(model)]]
    peers = [rank for rank in everyone if rank != fabric.rank]
    try:
        for peer in peers:
            fabric.send(peer, label, ())
        barriers = [fabric.barrier_async(label, group) for group in sorted({*groups, everyone}) if fabric.rank in group]
        for barrier in barriers:
            barrier.wait()
        for peer in peers:
            fabric.recv(peer, label)
    except PeerError as error:
        raise explain_announcement(error) from error
    gathered = fabric.gather_values("what all ranks train", cast("Json", facts), everyone)
    difference = first_difference(cast("list[NamedFacts]", gathered))
    if difference:
        raise PlanError(f"the ranks do not train the same model: {difference}")


def explain_announcement(error: PeerError) -> PeerError | PlanError:
    """Return the error for a change that some ranks have not made, if another error was caused by one; else that error.

    Example:
        >>> text = "rank 1 expects x1.0 from rank 0, but its next message is the change '0.bias was frozen'; messages"
        >>> str(explain_announcement(PeerError(text)))
        'between two steps 0.bias was frozen on rank 0, but not on all ranks; all ranks train one model: ...'
    """
    found = ANNOUNCEMENT.findall(str(error))
    if not found:
        return error
    changes = " and ".join(f"{change} on rank {rank}" for rank, change in dict.fromkeys(found))
    return PlanError(
        f"between two steps {changes}, but not on all ranks; all ranks train one model: freeze and thaw parameters, "
        "add groups to the optimizer and set modes of modules equally on all of them, before the same step"
    )
