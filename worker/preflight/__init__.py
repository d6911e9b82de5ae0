"""What must hold before a worker serves."""
