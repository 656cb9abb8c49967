"""Programs on tensors: the interpreter, the arenas it works on, and what each instruction does there."""
