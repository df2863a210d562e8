"""Mixture of experts without host syncs: routing, rows by expert, grouped products, dispatch, paged
stash."""
