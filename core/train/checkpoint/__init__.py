"""Complete states on disk, to the bit."""
