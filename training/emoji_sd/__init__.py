"""Training of emoji-sd, the small Stable Diffusion that ships with rocm-sd: one module a stage.

render -> train_embedding -> train_autoencoder -> train_unet -> export -> evaluate (docs/emoji-sd.md has the recipe).
"""
