"""Step commit: how all ranks decide alike whether and how a step is applied, on the host or on a device."""
