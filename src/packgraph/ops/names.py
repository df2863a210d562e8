"""Names of products and of attention kernels, as configurations hold them: they are read and
checked without torch."""

NATIVE = "bf16"  # in the dtype of the operands, whatever it is
PRECISIONS = (NATIVE, "fp8", "fp8_weight_gradients", "mxfp8")  # keys of `ops.linear.PRODUCTS`
ATTENTION = ("naive", "sdpa", "varlen", "flash")  # keys of `ops.attention.api.BACKENDS`
