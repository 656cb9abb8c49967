"""Orders of a pipeline: in which sequence a stage runs its microbatches, one generator function each."""
