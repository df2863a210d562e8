"""The mixing layer of Mamba-2 on packed documents: convolution, state space, gated norm."""
