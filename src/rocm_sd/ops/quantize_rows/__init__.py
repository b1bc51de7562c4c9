from rocm_sd.ops.quantize_rows.op import quantize_rows

__all__ = ["quantize_rows"]
