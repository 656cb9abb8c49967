"""The parameter server as state machines without effects: messages in, messages out, and a simulator to prove it in."""
