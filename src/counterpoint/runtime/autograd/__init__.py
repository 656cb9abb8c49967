"""Forwards and backwards of one rank: segments run with autograd, recomputation, deferred weight gradients."""
