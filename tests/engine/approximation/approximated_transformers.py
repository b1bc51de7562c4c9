"""The definition of an approximated transformer, by stock's own blocks: all of them are computed at every step, and
what the later ones add is put aside where a step is shallow.

A step without guidance of its own is one in which the half without the prompt is the other half less an earlier
difference, and in which that half neither counts for the decision nor changes what is kept of it.
"""

from __future__ import annotations

import torch

from pipelines import CASES

DEEP = {"sd3": {"num_layers": 6}, "flux": {"num_layers": 3, "num_single_layers": 4}}


def built(folder, name, dtype=torch.float32, **options):
    """The pipeline of that name, with a transformer of more blocks than two."""
    pipe = CASES[name].build(folder)
    torch.manual_seed(1)
    config = dict(pipe.transformer.config) | DEEP[name.partition("-")[0]] | options
    pipe.transformer = type(pipe.transformer).from_config(config).eval().to(pipe.device)
    # A fresh model's blocks change with the timestep by as much as they add; a trained one's do by less.
    for parameter in pipe.transformer.time_text_embed.parameters():
        parameter.data *= 0.5
    return pipe.to(dtype)


class _Kept:
    """Of the calls with one prompt in one picture."""

    def __init__(self, number):
        self.first = self.number = number
        self.features, self.added, self.difference = [], None, None


class TransformerDefinition:
    """On a stock pipeline: `skipping` as the engine takes it. `said`: W for each whole step, s for each shallow one."""

    def __init__(self, pipe, skipping):
        self.pipe, self.skipping, self.model = pipe, skipping, pipe.transformer
        self.is_flux = hasattr(self.model, "single_transformer_blocks")
        self.timesteps, self.kept, self.said, self.changes = None, {}, "", []
        self.model.forward = self.forward

    def of_this_call(self, timestep, text):
        timesteps = self.pipe.scheduler.timesteps
        if timesteps is not self.timesteps:
            self.timesteps, self.kept = timesteps, {}
        if id(text) not in self.kept:
            value = float(timestep[0]) * (1000 if self.is_flux else 1)
            # The text is kept as well: another one must not have its address.
            self.kept[id(text)] = _Kept(int((timesteps.double() - value).abs().argmin())), text
        else:
            self.kept[id(text)][0].number += 1
        return self.kept[id(text)][0]

    def embedded(self, hidden_states, encoder_hidden_states, pooled_projections, timestep, guidance, ids):
        model, text = self.model, self.model.context_embedder(encoder_hidden_states)
        if not self.is_flux:
            return model.pos_embed(hidden_states), text, model.time_text_embed(timestep, pooled_projections), {}
        x, times = model.x_embedder(hidden_states), [timestep * 1000]
        if guidance is not None:
            times.append(guidance.to(x.dtype) * 1000)
        return x, text, model.time_text_embed(*times, pooled_projections), {"image_rotary_emb": model.pos_embed(ids)}

    def forward(
        self, hidden_states, encoder_hidden_states, pooled_projections, timestep, guidance=None, img_ids=None,
        txt_ids=None, return_dict=True, joint_attention_kwargs=None, block_controlnet_hidden_states=None,
    ):  # fmt: skip
        assert not return_dict
        assert not joint_attention_kwargs
        kept = self.of_this_call(timestep, encoder_hidden_states)
        ids = torch.cat([txt_ids, img_ids]) if self.is_flux else None
        x, text, temb, more = self.embedded(
            hidden_states, encoder_hidden_states, pooled_projections, timestep, guidance, ids
        )
        after = [x]
        blocks = [*self.model.transformer_blocks, *getattr(self.model, "single_transformer_blocks", [])]
        for number, block in enumerate(blocks):
            text, x = block(hidden_states=x, encoder_hidden_states=text, temb=temb, **more)
            if block_controlnet_hidden_states is not None and number < len(blocks) - 1:
                share = len(blocks) / len(block_controlnet_hidden_states)
                x = x + block_controlnet_hidden_states[int(number / share)]
            after.append(x)
        return (self.guided(kept, after, temb, hidden_states),)

    def guided(self, kept, after, temb, hidden_states):
        skipping, batch = self.skipping, len(hidden_states)
        step = skipping.step(kept.number, kept.first, len(self.timesteps))
        halves = not self.is_flux and self.pipe.do_classifier_free_guidance and skipping.skips_guidance
        computed = slice(None) if step.guided or not halves else slice(batch // 2, None)
        x = self.joined(kept, step, after, computed)
        answer = self.model.proj_out(self.model.norm_out(x, temb))
        if not self.is_flux:
            side, (height, width) = self.model.config.patch_size, hidden_states.shape[-2:]
            answer = answer.unflatten(1, (height // side, width // side)).unflatten(-1, (side, side, -1))
            answer = answer.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
        if not halves:
            return answer
        without, with_prompt = answer.chunk(2)
        if step.guided:
            kept.difference = with_prompt - without
            return answer
        return torch.cat([with_prompt - (kept.difference if step.difference else 0), with_prompt])

    def joined(self, kept, step, after, computed):
        """The picture's tokens as they leave the last block, or would leave it."""
        skipping = self.skipping
        depth = max(skipping.depth, 1)
        head, added, later = after[depth], after[depth] - after[0], after[-1] - after[depth]
        shallow = skipping.caches and not step.whole and bool(kept.features)
        if shallow and skipping.first_block:
            before = kept.added[computed]
            change = float((added[computed] - before).abs().mean() / before.abs().mean())
            self.changes.append(change)
            shallow = change < skipping.first_block
        self.said += "s" if shallow else "W"
        if not shallow:
            if computed.start is not None and kept.features:
                later = torch.cat([kept.features[-1][1][: computed.start], later[computed]])
                added = torch.cat([kept.added[: computed.start], added[computed]])
            kept.features = [*(kept.features[-1:] if skipping.order else []), (kept.number, later)]
            kept.added = added
            return after[-1]
        (at, last), features = kept.features[-1], kept.features[-1][1]
        if len(kept.features) == 2:
            before, earlier = kept.features[0]
            features = earlier + (last - earlier) * (kept.number - before) / (at - before)
        return head + features
