"""Documents of heavy-tailed lengths for planned steps, read by number."""

import numpy as np

from packgraph.packing.document import Document
from packgraph.train.data.files import OpenedFiles
from packgraph.train.data.source import SourceDocument


class Source(OpenedFiles):
    """Documents of heavy-tailed lengths: number n depends on n alone. One fills the largest row to
    its last token."""

    def __init__(self, longest, count=400):
        super().__init__()
        draw = np.random.default_rng(longest)
        self.lengths = np.minimum(
            longest, np.maximum(2, draw.lognormal(2.0, 1.2, count).astype(int))
        )
        self.lengths[7], self.lengths[8:20] = longest, 2

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return SourceDocument(f"document {index}", text=str(index))


class Tokens:
    """Reads the numbers that `Source` gives as documents."""

    fingerprint, vocab_size = "numbers", 32

    def __init__(self, source):
        self.source = source

    def encode(self, document):
        index = int(document.text)
        tokens = np.random.default_rng(index).integers(32, size=self.source.lengths[index])
        return [Document(tokens)]
