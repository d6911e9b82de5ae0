"""Sessions: their rows, the log of their operations, and when they are parked."""
