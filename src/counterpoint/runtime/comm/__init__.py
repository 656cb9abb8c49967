"""Communication of one rank: messages, collectives, compression, gradient buckets, and a server's loop."""
