"""legato.parallel."""
