"""Profile machines and models: seconds, bytes and rates, measured on the machine or estimated without running."""
