"""The model registry over HTTP."""
