"""The bytes between workers and servers: letters over authenticated connections, and bounds on everything."""
