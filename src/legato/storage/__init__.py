"""legato.storage."""
