"""Systems that start ranks: one launch specification, rendered as the commands, scripts and manifests of each."""
