"""Agents that propose kernels and configs, and the proof ladder that decides: `rocm-sd improve`."""
