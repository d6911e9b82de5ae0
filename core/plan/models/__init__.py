"""Shapes and weights of models, read from headers and config.json without torch."""
