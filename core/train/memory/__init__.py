"""What lies where while training: how much memory is left, and blocks that pass through the device (docs/memory.md)."""
