"""Run programs on tensors: the interpreter, parameters, autograd, kernels and communication of one rank."""
