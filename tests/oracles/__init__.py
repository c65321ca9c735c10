"""Independent answers that the tests compare lean with: llama.cpp, transformers, and tiny random models."""
