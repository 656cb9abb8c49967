"""From an ``nn.Module`` to pieces that can run alone: traced once, cut where tensors are alive."""
