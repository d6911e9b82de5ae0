"""Optimizer state and activations in host memory."""
