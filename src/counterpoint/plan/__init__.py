"""What a user asks for: the plan as a value, its text and YAML, and the registry of strategy names."""
