"""Tensor operations of packed training; each has a naive twin that is its specification.

Every operation is safe inside a captured graph: static shapes, no host reads, values only from
device tensors. The naive twins read boundaries on the host and serve as oracles. Rows of padding
are defined: they are zeroed by assignment (`where`, `masked_fill`), never by multiplication, so
that whatever stood there reaches no result.
"""
