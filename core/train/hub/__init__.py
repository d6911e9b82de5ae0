"""Getting models and data sets: downloads, GGUF, the cache of models."""
