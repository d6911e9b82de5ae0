"""The tokens of a model."""
