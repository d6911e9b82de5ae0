"""The stages that learn from answers which the model samples itself."""
