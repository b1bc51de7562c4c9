"""ROCm SD Optimization: the host loads this file. Everything it does lies in the package rocm_sd."""

# ruff: noqa: INP001, T201, BLE001 -- a script that the host loads, and whose output it shows

import sys

try:
    from rocm_sd.integrations.a1111 import register
except Exception as error:  # the host must start, whatever is wrong with the package
    print(
        f"ROCm SD: the package rocm_sd cannot be imported ({type(error).__name__}: {error}). "
        f"Everything runs as without it. Type: {sys.executable} -m pip install --no-deps rocm-sd"
    )
else:
    # A class in this module is a script to the host; None is nothing.
    ROCmSDOptimization = register()
