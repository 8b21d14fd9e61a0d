"""legato.data."""
