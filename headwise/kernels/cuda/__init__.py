"""The kernels of a GPU: attention in Triton, KV write and block copy in CUDA C++. Importing this imports neither."""
