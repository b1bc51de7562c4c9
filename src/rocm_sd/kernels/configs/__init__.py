"""The configs of the Triton kernels, a file for each op; importing them needs no Triton."""
