"""HIP kernels: C++ headers in `include`, one source file an op in `sources`, one Python launcher an op beside them.

A launcher decides on the CPU what is compiled (`Kernel`: entry point and template parameters) and with which grid and
arguments it runs, and hands both to a `Launcher`: a card's runtime, or the proof ladder's emulator.
"""
