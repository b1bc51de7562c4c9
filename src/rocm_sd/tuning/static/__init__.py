"""Tuning with no GPU: every config of an op's space is compiled for an architecture and ranked by a modelled time."""
