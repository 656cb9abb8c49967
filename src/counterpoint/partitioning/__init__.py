"""Split an ``nn.Module`` into layers that run alone: by children of a Sequential, or along a traced graph."""
