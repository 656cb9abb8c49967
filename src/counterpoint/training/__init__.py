"""What a user holds: the trainer, the step for an own loop, and what happens around them."""
