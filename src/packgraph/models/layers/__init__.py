"""Layers that decoders are built from; each layer lists its stages."""
