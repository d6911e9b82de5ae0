"""The HTTP layer: connections, bodies, ranges, idempotency."""
