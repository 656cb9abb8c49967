"""The profiler measures what predictions are made of, on real tensors and links: what ranks, links and models take.

It is the only room beside the runtime that runs tensors, so that those who predict need none.
"""
