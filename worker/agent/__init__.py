"""The agent of a box, and its standby trainer or fork server."""
