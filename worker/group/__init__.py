"""Ranks that hold one copy of a model and step together."""
