"""The paged stash: what experts save for backward lies in pages of one pool."""
