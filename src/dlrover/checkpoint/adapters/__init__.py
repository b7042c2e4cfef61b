"""Flash Checkpoint inside other libraries: one module for each, which needs that library.

See `transformers`, `deepspeed`, `lightning`, `accelerate`, `megatron` and `dcp` in this package.
"""
