"""Workers that may join and leave at any time, with parameter servers or by allreduce, and the data that they share."""
