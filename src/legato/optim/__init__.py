"""legato.optim."""
