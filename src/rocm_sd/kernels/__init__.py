"""Level 1: device code. Bodies and launchers; which config to use is decided above."""
