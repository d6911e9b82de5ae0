"""Text that the model writes, with the weights and kernels of training."""
