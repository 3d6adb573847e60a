"""The kernels in Triton's language. Import a module where its first kernel is launched."""
