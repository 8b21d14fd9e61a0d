"""legato.train."""
