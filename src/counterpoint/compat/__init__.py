"""Doors to other programs: what is written for torch.distributed runs on Counterpoint's fabric without a change."""
