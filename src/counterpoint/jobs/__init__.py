"""The main jobs that `counterpoint train NAME` runs: real data, a model, and a bar to reach."""
