"""A world for servers, workers and their coordinator, drawn from a seed: bad links, crashes, and what must hold."""
