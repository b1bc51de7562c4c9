# Written by tools/docs_tables.py from what the ops' packages export: not to be edited.
from rocm_sd.ops.attention import attention
from rocm_sd.ops.conv2d import conv2d
from rocm_sd.ops.conv2d_8bit import conv2d_8bit
from rocm_sd.ops.geglu import geglu
from rocm_sd.ops.geglu_8bit import geglu_8bit
from rocm_sd.ops.group_norm_silu import group_norm_silu
from rocm_sd.ops.guided_step import guided_step
from rocm_sd.ops.layer_norm_8bit import layer_norm_8bit
from rocm_sd.ops.layer_norm_residual import layer_norm_residual
from rocm_sd.ops.layout_copy import layout_copy
from rocm_sd.ops.linear_8bit import linear_8bit
from rocm_sd.ops.linear_geglu import linear_geglu
from rocm_sd.ops.linear_residual import linear_residual, pack_linears, split_columns, split_heads
from rocm_sd.ops.quantize_rows import quantize_rows
from rocm_sd.ops.registry import OPS
from rocm_sd.ops.transformer_block import transformer_block
from rocm_sd.ops.upsample import upsample
from rocm_sd.ops.upsample_conv2d import parity_weights, upsample_conv2d

__all__ = [
    "OPS",
    "attention",
    "conv2d",
    "conv2d_8bit",
    "geglu",
    "geglu_8bit",
    "group_norm_silu",
    "guided_step",
    "layer_norm_8bit",
    "layer_norm_residual",
    "layout_copy",
    "linear_8bit",
    "linear_geglu",
    "linear_residual",
    "pack_linears",
    "parity_weights",
    "quantize_rows",
    "split_columns",
    "split_heads",
    "transformer_block",
    "upsample",
    "upsample_conv2d",
]
