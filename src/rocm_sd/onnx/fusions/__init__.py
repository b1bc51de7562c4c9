"""Fusions of exported models, one file each; `fusing` applies them. Importing this package needs no ONNX."""
