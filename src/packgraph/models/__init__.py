"""Decoders built from stages, and their exchange with Hugging Face checkpoints."""
