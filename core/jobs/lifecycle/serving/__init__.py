"""Models that are served: which one a name means, the child that serves it, and requests to it."""
