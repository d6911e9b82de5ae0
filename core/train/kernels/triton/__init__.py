"""Kernels in Triton, for CUDA and ROCm. Imported by `core.train.kernels.interface` alone, and only for such a device:
the library `triton` comes with torch's builds for them and is no dependency of ours."""
