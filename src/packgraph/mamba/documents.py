"""Document ids as convolution and state space operations read them: padding is marked, not
numbered.

    batch.document_ids    0 0 0 1 1 2 2 2 2 N N          document_ids    0 0 0 1 1 2 2 2 2 -1 -1

These operations ask two things of a row: is it padding (its id is negative), and does another row
belong to the same document (their ids are equal). So numbers may start anywhere and leave out
documents without tokens, but the rows of a document must follow one another in the document's
order.
"""

from torch import Tensor

from packgraph.packing.batch import PackedBatch


def live_document_ids(batch: PackedBatch) -> Tensor:
    """int32 [T]: number of each row's document, -1 in padding. One kernel: make it once per
    microbatch, for all layers.

    batch: anything with the fields `document_ids` (int32 [T]) and `padding_mask` (bool [T]).
    """
    return batch.document_ids.masked_fill(batch.padding_mask, -1)
