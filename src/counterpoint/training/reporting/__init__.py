"""What a run shows: progress renderers, the HTML report, TensorBoard files, calibrated simulation."""
