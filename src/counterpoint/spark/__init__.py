"""Training on Spark data: BigDL-style steps as two Spark jobs, or ranks in a barrier stage."""
