"""Whether a job fits a slot, and what makes it fit: memory, `method: auto`, out-of-memory backoff."""
