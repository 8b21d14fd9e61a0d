"""legato.cli."""
