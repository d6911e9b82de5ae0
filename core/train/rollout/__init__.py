"""Answers that the model samples for prompts, what they are rewarded for, and training on them."""
