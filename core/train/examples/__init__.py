"""What a row becomes: sequences that stay together, and numbers of their own."""
