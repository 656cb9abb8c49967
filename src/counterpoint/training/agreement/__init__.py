"""What ranks are given, compared before the first step and in every commit."""
