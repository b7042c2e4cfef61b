"""Flash Checkpoint inside other libraries, with one module per library, which requires it.

See `transformers`, `deepspeed`, `lightning`, `accelerate`, `megatron` and `dcp` in this package.
"""
