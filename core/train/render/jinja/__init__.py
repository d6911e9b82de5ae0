"""Chat templates, run in a sandbox with bounds on time and memory."""
