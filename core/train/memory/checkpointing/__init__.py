"""Activation checkpointing: what a block keeps between forward and backward."""
