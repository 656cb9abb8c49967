from tests.shared_traces import _share_traces

__all__ = ["_share_traces"]
