"""What `rocm-sd contribute` does on a machine: parts, one after the other, each in processes whose end costs little.

Imported by the command line alone. What is found becomes one file: `rocm_sd.bench.card_report`.
"""
