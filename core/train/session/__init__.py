"""The child of a session: one resident base, adapters on it, and verbs that a caller elsewhere asks for."""
