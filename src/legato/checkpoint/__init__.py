"""legato.checkpoint."""
