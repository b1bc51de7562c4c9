"""The base of the host's attention optimizations, and the one that ours falls back on."""

from __future__ import annotations

import torch.nn.functional as F


class SdOptimization:
    name = None
    label = None
    cmd_opt = None
    priority = 0

    def title(self):
        return self.name if self.label is None else f"{self.name} - {self.label}"

    def is_available(self):
        return True

    def apply(self):
        pass

    def undo(self):
        pass


def scaled_dot_product_attention_forward(self, x, context=None, mask=None, **kwargs):
    text = x if context is None else context
    split = [
        y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.to_q(x), self.to_k(text), self.to_v(text))
    ]
    return self.to_out(F.scaled_dot_product_attention(*split, attn_mask=mask).transpose(1, 2).flatten(2))


def sdp_attnblock_forward(self, x):
    h = self.norm(x)
    q, k, v = (layer(h).flatten(2).transpose(1, 2) for layer in (self.q, self.k, self.v))
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
    return x + self.proj_out(out)
