"""Losses that never hold whole logits."""
