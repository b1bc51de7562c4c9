"""Hypernetworks change the text that attention sees."""

from __future__ import annotations


def apply_hypernetworks(hypernetworks, context, layer=None):
    keys = values = context
    for network in hypernetworks:
        keys, values = network(keys, values)
    return keys, values
