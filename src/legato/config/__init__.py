"""A run's config: the schema, and how files and command lines become one. Imports no torch."""
