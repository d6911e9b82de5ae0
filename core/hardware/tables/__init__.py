"""What is known of architectures, wheels and faults, as data with sources."""
