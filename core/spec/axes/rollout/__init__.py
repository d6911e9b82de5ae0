"""What a stage that samples its answers is told about them."""
