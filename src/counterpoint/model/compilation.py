"""Compilation of a plan's forwards with ``torch.compile``: which parts of the model are graphs of their own, and how.

Source: "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph Compilation"
(Ansel et al., ASPLOS 2024); ``blocks`` is what torch calls regional compilation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TypeAlias

from counterpoint.errors import PlanError
from counterpoint.model.option_text import parse_option_text
from counterpoint.optim.validation import shorten

PARTS = ("segments", "blocks")
_WORD = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class Compilation:
    """How ``torch.compile`` compiles what ranks run of a model.

    Args:
        parts: ``segments`` for what a rank runs between two instructions that communicate, as one graph; ``blocks`` for
            each block of the model, so that identical ones share a graph.
        backend: of ``torch.compile``, by name.
        mode: of ``torch.compile``, such as ``max-autotune``; None for its default.

    Raises:
        PlanError: ``parts`` is another word, or a name is empty or has other characters.

    Example:
        >>> print(Compilation("segments", backend="aot_eager"))
        segments(backend=aot_eager)
    """

    parts: str
    backend: str = "inductor"
    mode: str | None = None

    def __post_init__(self) -> None:
        if self.parts not in PARTS:
            raise PlanError(f"compile={shorten(repr(self.parts))} is not one of {', '.join(PARTS)}, or None")
        for name in ("backend", "mode"):
            value = getattr(self, name)
            is_name = isinstance(value, str) and _WORD.fullmatch(value) is not None
            if not is_name and not (name == "mode" and value is None):
                raise PlanError(f"{name}={shorten(repr(value))} is not a name; give one that torch.compile knows")

    def __str__(self) -> str:
        """Write it as :func:`parse_compilation` reads it."""
        options = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)[1:]
            if getattr(self, field.name) != field.default
        ]
        return f"{self.parts}({', '.join(options)})" if options else self.parts


CompilationArgument: TypeAlias = Compilation | str | None
"""What options take: a compilation, its text, or None to run the model eagerly."""


def parse_compilation(value: object) -> Compilation | None:
    """Return the compilation that an option asks for; None to run the model eagerly.

    Args:
        value: a compilation, None, or a text such as ``segments`` or ``blocks(backend=inductor, mode=max-autotune)``.

    Raises:
        PlanError: it is something else.

    Example:
        >>> parse_compilation("blocks(backend=eager)")
        Compilation(parts='blocks', backend='eager', mode=None)
    """
    if value is None or isinstance(value, Compilation):
        return value
    known = "give 'segments', 'blocks', a text such as 'segments(backend=inductor, mode=max-autotune)', or None"
    parts, texts = parse_option_text(
        "compile",
        value,
        {"backend", "mode"},
        known=known,
        rule="the options are backend=... and mode=..., as of torch.compile",
    )
    return Compilation(parts, **texts)
