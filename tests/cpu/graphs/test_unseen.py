"""What is left out of the watch of operations: torch's own work for a compiler."""

import pytest
import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.decorators import skip
from torch.utils._python_dispatch import TorchDispatchMode

from packgraph.graphs.checks.host_sync import CodeWatcher, compiled_stages


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_compiler_traces_no_watcher_of_operations():
    """torch hides a mode from its compiler in every call; this library's only where one waits."""
    found = []

    @skip
    def left_to_eager(x):
        return x + 1

    def under(mode):
        found.clear()
        torch._dynamo.reset()
        with compiled_stages(), mode:
            torch.compile(lambda x: left_to_eager(x) * 2, backend="eager")(torch.ones(2))
        assert found
        return [one for one in found if one is not None]

    class Hidden(CodeWatcher):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found.append(get_eval_frame_callback())
            return func(*args, **(kwargs or {}))

    class Plain(TorchDispatchMode):
        """Negative control: a compiler waits for the frames of what it has left to eager."""

        @classmethod
        def _should_skip_dynamo(cls):
            return False

        @classmethod
        def ignore_compile_internals(cls):
            return True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found.append(get_eval_frame_callback())
            return func(*args, **(kwargs or {}))

    assert under(Hidden()) == []
    assert under(Plain()) != []
