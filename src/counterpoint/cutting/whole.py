"""A model that is not cut: one block, called as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from counterpoint.cutting.cost import Meter
from counterpoint.cutting.cut import Cut, Seed, Segment, num_bytes, params_of
from counterpoint.cutting.eager import Inputs, Modes, call_of, num_samples, unmarked
from counterpoint.cutting.leaves import Nest, nest_of, nest_of_output
from counterpoint.cutting.seeds import Seeding, silent
from counterpoint.errors import PlanError
from counterpoint.model.spec import Block, ModelSpec, Piece
from counterpoint.model.values import INPUT, Made


class WholeCut(Cut):
    """The model as one block ``model``, run with its own parameters: those passed to a call are not looked at.

    So each rank of a process needs its own copy of the model. The model is run once here to see what it costs.

    Args:
        model: any module.
        inputs: an example of what it is called with.
    """

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self._args, self._kwargs = call_of(inputs)
        with unmarked(model), Meter() as meter:
            output = model(*self._args, **self._kwargs)
        samples = num_samples(inputs)
        params = params_of(model)
        piece = Piece(
            "model",
            tuple(param.name for param in params),
            cost=meter.flops / samples,
            output_bytes=num_bytes(nest_of_output(output).flatten(output)) // samples,
        )
        self._call = nest_of((self._args, self._kwargs))
        self._values = (Made(INPUT, (0,)),) * len(self._call.places)
        super().__init__(ModelSpec((Block((piece,), 0),), params, self._values), draws=meter.draws)
        self.model = model
        self._modes = Modes(model)
        self._seeding = Seeding(model, silent) if meter.draws else None
        self._is_plain = not self._kwargs and all(isinstance(arg, Tensor) for arg in self._args)
        self._outputs = {True: nest_of_output(output)}
        self._segments: dict[bool, Segment] = {}

    def segment(self, first_piece: int, stop_piece: int, *, training: bool) -> Segment:
        """Return the call of the model; there is only the one piece."""
        if (first_piece, stop_piece) != (0, 1):
            raise PlanError(
                f"pieces {first_piece} to {stop_piece} of a model that is not cut; it has only piece 0; "
                "ask for segment(0, 1), or cut the model with need='chain'"
            )
        if training not in self._segments:
            self._segments[training] = self._make(training=training)
        return self._segments[training]

    def _make(self, *, training: bool) -> Segment:
        model, seeding, call, is_plain = self.model, self._seeding, self._call, self._is_plain
        modes = self._modes
        nest = self._output(training=training)

        def run(
            values: Sequence[Tensor], params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], seed: Seed
        ) -> tuple[Tensor, ...]:
            """Run the whole model with its own parameters and buffers; those that are passed are not looked at."""
            if model.training is not training:
                modes.set(training=training)
            if seeding is not None:
                seeding.seed = seed
            if is_plain:
                output = model(*values)
            else:
                args, kwargs = call.unflatten(values)
                output = model(*args, **kwargs)
            return nest.flatten(output)

        return Segment(
            inputs=tuple(range(len(self._values))),
            outputs=(),
            params=self.spec.pieces[0].params,
            buffers=tuple(name for name, _ in model.named_buffers()),
            run=run,
        )

    def _output(self, *, training: bool) -> Nest:
        if training not in self._outputs:
            with unmarked(self.model, training=training):
                output = self.model(*self._args, **self._kwargs)
            self._outputs[training] = nest_of_output(output)
        return self._outputs[training]

    def values(self, *, training: bool) -> tuple[Made, ...]:
        """Return the inputs; there is nothing else."""
        return self._values

    def flatten_inputs(self, inputs: Inputs, *, training: bool = True) -> tuple[Tensor, ...]:
        """Return the tensors among the inputs."""
        if self._is_plain and type(inputs) is tuple:
            return inputs
        return self._call.flatten(call_of(inputs))

    def unflatten_output(self, values: Sequence[Tensor], *, training: bool = True) -> Any:  # noqa: ANN401
        """Return the output as the model gives it in this mode."""
        return self._output(training=training).unflatten(values)
