"""Adapters between frameworks and an engine; each imports its framework only when it is imported itself."""
