"""Plug-ins for geglu: each misbehaves in its own way, or does not."""

from __future__ import annotations

# Candidates of geglu by name; each takes the op's own arguments.
CANDIDATES = """
    import ctypes, os, time
    import torch
    from rocm_sd.ops import OPS
    from rocm_sd.ops.definition import Implementation
    from rocm_sd.ops.plugins import Extra

    stock = OPS["geglu"].implementations[0].run
    kept = {}

    def aborts(x, bias, *, config):
        os.abort()

    def hangs(x, bias, *, config):
        time.sleep(1000)

    def hangs_once(x, bias, *, config):
        if not os.path.exists(os.environ["HUNG_BEFORE"]):
            open(os.environ["HUNG_BEFORE"], "w").close()
            time.sleep(1000)
        return stock(x, bias)

    def nans(x, bias, *, config):
        y = stock(x, bias)
        return y.fill_(float("nan"))

    def wrong_once(x, bias, *, config):
        y = stock(x, bias)
        y.view(-1)[123_456] += 0.01
        return y

    def leaves_out(x, bias, *, config):
        y = torch.empty_like(stock(x, bias))
        return y

    def raises(x, bias, *, config):
        raise ValueError("not today")

    def wrong_later(x, bias, *, config):
        kept["calls"] = kept.get("calls", 0) + 1
        return stock(x, bias) + (kept["calls"] > 3)

    def sleeps(x, bias, *, config):
        time.sleep(config.get("ms", 2) / 1000)
        return stock(x, bias)

    def remembers(x, bias, *, config):
        if "y" not in kept:
            kept["y"] = stock(x, bias)
        return kept["y"]

    def of(name, run, configs=({},)):
        made = Implementation(name, run, lambda problem, device: None)
        return Extra("geglu", made, lambda problem, arch: configs, "1")
"""
