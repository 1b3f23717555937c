"""GGUF files, as llama.cpp has them: another's as a source of weights, ours as a file that such engines run."""
