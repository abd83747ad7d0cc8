"""Training and evaluation data: dealing among ranks, position, seeds."""
