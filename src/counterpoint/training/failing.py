"""What becomes of a step and of the weights when something fails in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from counterpoint.errors import CounterpointError
from counterpoint.runtime.abandoned import abandon
from counterpoint.runtime.build import Rank
from counterpoint.runtime.interpreter import Interpreter
from counterpoint.training.elsewhere import Elsewhere
from counterpoint.training.flight import Flight
from counterpoint.training.world import JoinedWorld, World


class Team(Protocol):
    """The ranks of this process, with what they have under way."""

    world: World
    ranks: dict[int, Rank]
    flight: Flight
    elsewhere: Elsewhere

    def give_back(self) -> None:
        """Put the trained weights into the user's model."""


@contextmanager
def noting(interpreter: Interpreter, rank: int) -> Iterator[None]:
    """Note on an error of the user's code in which step, on which rank and microbatch it came up."""
    try:
        yield
    except CounterpointError:
        raise
    except Exception as error:
        error.add_note(f"in step {interpreter.dice.step} on rank {rank}, microbatch {interpreter.dice.micro}")
        raise


@contextmanager
def abandoning(world: World, ranks: Mapping[int, Rank], flight: Flight) -> Iterator[None]:
    """Where all ranks are here, a step that fails inside is left out and others may follow; else it ends the ranks."""
    try:
        yield
    except BaseException:
        flight.feeds.clear()
        if not isinstance(world, JoinedWorld):
            for rank in ranks.values():
                abandon(rank.interpreter)
        raise


def leave(team: Team, error: BaseException, began: str) -> None:
    """Drop what is under way; where all ranks are here, the model gets what was learned, else the others are told.

    Where they are told, weights that only ranks in other processes train are nan here.

    Args:
        team: whose training has ended with an error.
        error: the error.
        began: what came before the training, for a note that weights may be as they were then.
    """
    team.flight.feeds.clear()
    try:
        if isinstance(team.world, JoinedWorld):
            team.world.stop(error)
            team.elsewhere.lose(error)
        else:
            team.give_back()
    except CounterpointError as also:
        error.add_note(
            f"the trained weights could not be given back: {also}; the model's are from before {began}, or what some "
            "rank had come to: load a checkpoint (resume=...), or build the model again"
        )
