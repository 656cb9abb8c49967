"""Communication of one rank: messages, collectives, compression, gradient buckets, and the loop of a parameter server."""
