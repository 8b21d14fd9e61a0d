"""Optimizers by name, and the learning rate as a function of the step."""
