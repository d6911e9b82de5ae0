"""Linear algebra whose result from torch is inexact on one kind of device, or changes from process to process."""
