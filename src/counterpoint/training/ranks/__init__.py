"""The ranks of this process: a plan compiled for a model, the ranks built of it, and their memory."""
