"""The child that answers requests: one resident base, adapters on it, and answers in one batch as they come and go."""
