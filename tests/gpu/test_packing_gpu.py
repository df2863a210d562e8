"""Uploading a microbatch: one copy that the host does not wait for."""

import pytest
import torch

from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

pytestmark = pytest.mark.gpu


def test_upload_is_one_asynchronous_copy():
    batch = PackedBatch.build([[1, 2, 3], [4]], Capacity(4096, 64))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        uploaded = batch.to("cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert uploaded.lengths == batch.lengths
    assert torch.equal(uploaded.data.cpu(), batch.data)
    assert uploaded.to("cpu").tokens.tolist() == batch.tokens.tolist()
