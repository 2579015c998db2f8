"""Kernels of CPUs, compiled by Numba: attention, and what compiled code of any kind needs."""
