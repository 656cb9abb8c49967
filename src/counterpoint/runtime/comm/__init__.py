"""Communication of one rank: sends, collectives, gradient buckets overlapped with backward, the server's loop."""
