"""Folders with quantised weights, in the layout of compressed-tensors (vLLM, SGLang, llm-compressor, transformers)."""
