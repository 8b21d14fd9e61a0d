"""legato.config."""
