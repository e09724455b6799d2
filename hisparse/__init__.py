"""HiSparse on Ray: host-tier KV cache for DeepSeek-Sparse-Attention models."""

__version__ = "0.1.0"
