"""Legato's checkpoints inside other people's training loops."""
