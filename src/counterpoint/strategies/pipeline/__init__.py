"""Pipeline parallelism: how a model is split into stages, and what each stage replica executes."""
