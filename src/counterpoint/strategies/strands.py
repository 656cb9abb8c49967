"""Which strands a stage takes from others and gives them, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.model.spec import ModelSpec
from counterpoint.program.instruction import Value
from counterpoint.program.strands import Strand


@dataclass(frozen=True, slots=True)
class Strands:
    """The strands of a model whose blocks lie in stages. Inside a stage nothing is sent.

    Values go straight from the stage that makes them to each stage that reads them, once; so do their gradients back,
    when all blocks of a stage that read them have added to them.

    Args:
        strands: of the model.
        stage_of: for each block its stage.
    """

    strands: tuple[Strand, ...]
    stage_of: tuple[int, ...]

    @staticmethod
    def of(model: ModelSpec, runs: Sequence[tuple[Sequence[int], int]]) -> Strands:
        """Return the strands between runs of blocks, each given with its stage."""
        stage_of = {block: stage for run, stage in runs for block in run}
        return Strands(model.strands, tuple(stage_of[block] for block in range(model.num_blocks)))

    def readers(self, strand: Strand) -> list[int]:
        """Return the other stages that read a strand, in the order of their first blocks that do."""
        own = self.stage_of[strand.maker]
        return [stage for stage in dict.fromkeys(self.stage_of[block] for block in strand.readers) if stage != own]

    def taken_forward(self, run: range, micro: int) -> list[tuple[Value, int]]:
        """Return what blocks of a stage read, and the stages that it comes from."""
        stage = self.stage_of[run[0]]
        found = [(strand, self.stage_of[strand.maker]) for strand in self.strands if _meets(strand.readers, run)]
        return [(strand.value(micro), maker) for strand, maker in found if maker != stage]

    def given_forward(self, run: range, micro: int) -> list[tuple[Value, int]]:
        """Return what blocks make for other stages, and these."""
        made = [strand for strand in self.strands if strand.maker in run]
        return [(strand.value(micro), stage) for strand in made for stage in self.readers(strand)]

    def taken_backward(self, run: range, micro: int) -> list[tuple[Value, int]]:
        """Return the gradients that come back to blocks, and the stages that they come from."""
        made = [strand for strand in self.strands if strand.maker in run and strand.gradient_bytes is not None]
        return [(strand.gradient(micro), stage) for strand in made for stage in self.readers(strand)]

    def given_backward(self, run: range, micro: int) -> list[tuple[Value, int]]:
        """Return the gradients that are complete on a stage behind these blocks, and the stages that they go to."""
        stage = self.stage_of[run[0]]
        found = []
        for strand in self.strands:
            maker = self.stage_of[strand.maker]
            first = next((block for block in strand.readers if self.stage_of[block] == stage), None)
            if maker != stage and first in run and strand.gradient_bytes is not None:
                found.append((strand.gradient(micro), maker))
        return found

    def sent_bytes(self, stage: int) -> int:
        """Return the bytes per sample that a stage sends, forward and backward."""
        total = 0
        for strand in self.strands:
            readers = self.readers(strand)
            if self.stage_of[strand.maker] == stage:
                total += strand.num_bytes * len(readers)
            elif stage in readers:
                total += strand.gradient_bytes or 0
        return total

    @property
    def most_between(self) -> int:
        """How many strands go from one stage to another one at most; 1 where only neighbours have one each."""
        counts: dict[tuple[int, int], int] = {}
        for strand in self.strands:
            for stage in self.readers(strand):
                pair = (self.stage_of[strand.maker], stage)
                counts[pair] = counts.get(pair, 0) + 1
        return max(counts.values(), default=0)

    @property
    def are_links(self) -> bool:
        """Whether all that stages send goes to the next one."""
        return all(strand.is_link for strand in self.strands if self.readers(strand))


def _meets(blocks: Sequence[int], run: range) -> bool:
    return any(block in run for block in blocks)
