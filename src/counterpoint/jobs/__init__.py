"""The main jobs that `counterpoint train JOB_NAME` runs: real data, a model, and a bar to reach."""
