"""legato.report."""
