from rocm_sd.ops.transformer_block.op import transformer_block

__all__ = ["transformer_block"]
