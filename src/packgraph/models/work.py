"""What the branches of a layer cost compared with each other, before anything has been measured:
for cutting stages.

    cost of a branch = max(tokens x weights of a token, BALANCE x weights that are there) + tokens x
    other work

The unit is one weight times one token: 2 operations in the forward, 4 in the backward. With few
tokens a product takes as long as its weights take to be read, which matters where a token passes
some of many experts. What every branch has much alike (norms, residuals) is left out, and so is
attention proper, which depends on how long documents are.

The constants are those of one H200 in bfloat16 and only ratios count (docs/LOG.md;
docs/benchmarks.md): products reach two thirds of 797 TFLOP/s, memory is read and written at 4.3
TB/s.
"""

from dataclasses import dataclass

# A weight is read in the forward and in the backward, its gradient is read and written: 8 bytes, as
# long as the 6 operations for each of so many tokens take.
BALANCE = 165
# State space and convolution of Mamba-2 take 950 us, forward and backward, for 4096 tokens, 4096
# columns of heads and a state of 128: as long as so many weights for each column and number of its
# state.
SCAN_WEIGHTS = 40


@dataclass(frozen=True)
class BranchWork:
    """What one branch has to do. weights: that a token is multiplied by. stored: weights that are
    read whatever the tokens need. other: further work for a token, in weights."""

    weights: int
    stored: int
    other: int = 0

    def cost(self, tokens: int) -> int:
        """For a row of so many tokens, forward and backward."""
        return max(tokens * self.weights, BALANCE * self.stored) + tokens * self.other
