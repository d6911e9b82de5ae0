"""The life of a job, from submission to its end: states, transitions, claims, leases, events."""
