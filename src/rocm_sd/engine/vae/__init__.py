"""A VAE's decode and encode by plan: whole, one picture at a time or in strips, before memory can run out."""

from rocm_sd.engine.vae.planned import decode_together, install

__all__ = ["decode_together", "install"]
