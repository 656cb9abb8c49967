"""The bytes between workers and servers: letters over authenticated links, with deadlines and bounds on everything."""
