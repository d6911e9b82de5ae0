"""GGUF files: written by llama.cpp's converter, and proven by llama.cpp's engine. Both run in processes of their own
over the libraries of core/tools/requirements-gguf.txt."""
