"""Split an ``nn.Module`` into layers that run separately: by children of a Sequential, or along a traced graph."""
