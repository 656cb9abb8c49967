"""What happens between steps: what users read of model and optimizer is right or refused, what they change is used."""
