"""Measure a model on public tasks, through EleutherAI's lm-eval."""
