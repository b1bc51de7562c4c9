"""On-device search: which implementation and config of each op is fastest on this card, at the sizes that are drawn."""
