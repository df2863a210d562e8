"""Glue between the trainer and each feature; the features have packages of their own."""
