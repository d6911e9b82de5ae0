"""What the Triton kernels become on each GPU, found out without one: compiled ahead of time, measured, held to a
committed table."""
