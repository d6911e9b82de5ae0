"""Copies between host memory and the device."""
