"""From a program to a trace on a virtual clock: what a step would cost, before anything runs."""
