"""Where GPUs are found: one module a source."""
