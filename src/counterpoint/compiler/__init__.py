"""Compile a plan to a program: the single-device step, the strategies applied to it, the passes, the verification."""
