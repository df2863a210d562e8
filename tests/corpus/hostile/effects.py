"""Effects of forward beside its outputs, and numbers that it reads on the host."""

import ctypes
import functools
import sys
import threading

import numpy as np
import torch
from corpus.hostile.kit import Lin, Own, X, case, cases, train
from torch import nn

HERE = sys.modules[__name__]
COUNTS = {"n": 0}


def bump():
    bump.n = getattr(bump, "n", 0) + 1
    return float(bump.n)


@case
def counter_in_a_numpy_array():
    def forward(self, x):
        self.n[0] += 1
        return self.l(x) * float(self.n[0])

    train(Own(forward, n=np.zeros(1)), observe=lambda m: float(m.n[0]))


cases(
    counter_on_a_function=lambda: train(
        Own(lambda m, x: m.l(x) * bump()), observe=lambda m: bump.n
    ),
)


class AfterCounter:
    calls = 0

    def count(self):
        AfterCounter.calls += 1
        return float(AfterCounter.calls)


@case
def counter_on_a_mixin_after_module():
    class M(nn.Module, AfterCounter):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(4, 4)

        def forward(self, x):
            return self.l(x) * self.count()

    train(M(), observe=lambda m: AfterCounter.calls)


class Dying:
    def __del__(self):
        COUNTS["n"] += 1


@case
def effect_of_a_del():
    def forward(self, x):
        Dying()
        return self.l(x) * float(COUNTS["n"])

    train(Own(forward), observe=lambda m: COUNTS["n"])


@case
def round_robin_by_order_of_an_own_dict():
    def forward(self, x):
        k = next(iter(self.r))
        self.r[k] = self.r.pop(k)
        return self.l(x) * k

    train(Own(forward, r={float(i): 0 for i in range(1, 8)}), observe=lambda m: next(iter(m.r)))


@case
def lru_cache_that_makes_ids():
    n = [0.0]

    @functools.cache
    def number(k):
        n[0] += 1
        return n[0]

    def ch(m, i, g):
        if i == 5:
            number.cache_clear()

    train(Own(lambda m, x: m.l(x) * number(m.training)), ch, observe=lambda m: n[0])


@case
def storage_copy():
    def forward(self, x):
        self.b.untyped_storage().copy_(self.c.untyped_storage())
        self.c.add_(1.0)
        return self.l(x) * self.b

    train(Own(forward, buffers={"b": torch.ones(4), "c": torch.full((4,), 2.0)}))


cases(
    storage_byte_read_of_input=lambda: train(
        Own(lambda m, x, f: m.l(x) * (2.0 if f.untyped_storage()[0] else 1.0)),
        inp=lambda i: (X(i), torch.full((4,), int(i >= 5), dtype=torch.uint8)),
    ),
    pointer_read=lambda: train(
        Own(
            lambda m, x: m.l(x) * ctypes.c_float.from_address(m.w.data_ptr()).value,
            buffers={"w": torch.ones(1)},
        ),
        lambda m, i, g: m.w.fill_(1.0 + (i >= 5)),
    ),
)


@case
def numpy_view_held_of_a_buffer():
    class M(Lin):
        def __init__(self):
            super().__init__()
            self.register_buffer("w", torch.ones(1))
            self.view = self.w.numpy()

        def forward(self, x):
            return self.l(x) * float(self.view[0])

    train(M(), lambda m, i, g: m.w.fill_(1.0 + (i >= 5)))


@case
def weight_written_by_numpy_between_calls():
    m = Lin()
    m.forward = None

    def ch(m, i, g):
        m.l.weight.detach().numpy()[0, i % 4] = i

    train(Own(lambda m, x: m.o(torch.tanh(m.l(x)))), ch)


@case
def from_numpy_inside_forward():
    a = np.ones(4, dtype=np.float32)

    def ch(m, i, g):
        a[:] = i

    train(Own(lambda m, x: m.l(x) * torch.from_numpy(a)), ch)


cases(
    number_that_python_counts=lambda: train(
        Own(lambda m, x: m.l(x) * float(threading.Thread().name.split("-")[1]))
    ),
)


# ---- composites that read the host
@case
def tensor_split_by_a_buffer():
    def forward(self, x):
        a, b = torch.tensor_split(self.l(x), self.at, dim=1)
        return a.sum() * 2 + b.sum() * 3

    train(
        Own(forward, buffers={"at": torch.tensor([1])}),
        lambda m, i, g: m.at.fill_(1 if i < 5 else 3),
    )


@case
def packed_sequence_by_lengths():
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.r = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x, n):
            out, _ = self.r(pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False))
            return pad_packed_sequence(out, batch_first=True, total_length=5)[0]

    train(M(), inp=lambda i: (X(i, 2, 5, 4), torch.tensor([5 - i % 3, 2 + i % 2])))


@case
def dynamic_quantisation_asks_scale():
    def forward(self, x):
        h = self.l(x)
        q = torch.quantize_per_tensor_dynamic(h.detach(), torch.qint8, False)
        return h * q.q_scale()

    train(Own(forward))


@case
def out_argument_of_a_held_tensor():
    def forward(self, x):
        with torch.no_grad():
            torch.mul(x, 3.0, out=self.t)
        return self.l(x) * self.t

    train(Own(forward, t=torch.zeros(3, 4)))


cases(
    quantile_of_a_tensor=lambda: train(
        Own(lambda m, x, q: torch.quantile(m.l(x), q, dim=1)),
        inp=lambda i: (X(i), torch.tensor([0.1 * (1 + i % 5)])),
    ),
    masked_scatter=lambda: train(Own(lambda m, x: m.l(x).masked_scatter(x > 0, m.o(x)))),
    full_of_a_tensor=lambda: train(
        Own(lambda m, x, a: m.l(x) * torch.full((4,), a)),
        inp=lambda i: (X(i), torch.tensor(float(i))),
    ),
    roll_by_a_tensor=lambda: train(
        Own(lambda m, x, a: torch.roll(m.l(x), a, 1) * X(3)),
        inp=lambda i: (X(i), torch.tensor(1 + i % 3)),
    ),
)


@case
def embedding_max_norm():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(7, 4, max_norm=0.5)

        def forward(self, i):
            return self.e(i)

    train(
        M(),
        inp=lambda i: torch.randint(0, 7, (3,), generator=torch.Generator().manual_seed(i)),
        opt=lambda m: torch.optim.SGD(m.parameters(), lr=0.5),
    )


cases(
    segment_reduce=lambda: train(
        Own(lambda m, x, n: torch.segment_reduce(m.l(x), "sum", lengths=n, unsafe=True)),
        inp=lambda i: (X(i), torch.tensor([1, 2] if i % 2 else [2, 1])),
    ),
    batch_norm_momentum_none=lambda: train(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    ),
)
