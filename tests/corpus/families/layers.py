"""The layers of torch.nn and what is usually built of them."""

import torch
from corpus.entry import Draw, Own, add, one, one_grad, words
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

GROUP = "layers"


def sequence(draw: Draw, step: int):
    return (draw.rows(2, 5, 4, grad=True),)


def image(draw: Draw, step: int):
    return (draw.rows(2, 3, 8, 8),)


def simple(name, make, inputs=one, **options):
    add(GROUP, name, make, inputs, **options)


class Tail(nn.Module):
    """A layer, and a linear one before or after it."""

    def __init__(self, layer, before=None, after=None):
        super().__init__()
        self.before, self.layer, self.after = before or nn.Identity(), layer, after or nn.Identity()

    def forward(self, *args):
        return self.after(self.layer(self.before(args[0]), *args[1:]))


for name, kind in {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}.items():
    for label, options in {
        "": {},
        " of two layers with dropout": {"num_layers": 2, "dropout": 0.2},
        " both ways": {"bidirectional": True},
    }.items():
        simple(
            f"{name}{label}",
            lambda kind=kind, options=options: kind(4, 4, batch_first=True, **options),
            sequence,
        )
    simple(
        f"{name} with a state given",
        lambda kind=kind: kind(4, 4, batch_first=True),
        lambda draw, step, kind=kind: (
            draw.rows(2, 5, 4),
            (draw.rows(1, 2, 4), draw.rows(1, 2, 4)) if kind is nn.LSTM else draw.rows(1, 2, 4),
        ),
    )
simple("LSTM with projections", lambda: nn.LSTM(4, 4, proj_size=2), sequence)
simple(
    "GRU over packed sequences", lambda: Own(_packed, rnn=nn.GRU(4, 4, batch_first=True)), sequence
)


def _packed(m, x):
    packed = nn.utils.rnn.pack_padded_sequence(m.linear(x), torch.tensor([5, 3]), batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(m.rnn(packed)[0], batch_first=True)[0]


def _cells(m, x):
    state = torch.zeros(x.shape[0], 4, device=x.device)
    pair = (state, state)
    found = []
    for t in range(x.shape[1]):
        if isinstance(m.cell, nn.LSTMCell):
            pair = m.cell(x[:, t], pair)
            found.append(pair[0])
        else:
            state = m.cell(x[:, t], state)
            found.append(state)
    return torch.stack(found, 1), found[-1]


for cell in (nn.RNNCell, nn.GRUCell, nn.LSTMCell):
    simple(f"loop of {cell.__name__}", lambda cell=cell: Own(_cells, cell=cell(4, 4)), sequence)
simple(
    "loop of GRUCell, length changes",
    lambda: Own(_cells, cell=nn.GRUCell(4, 4)),
    lambda draw, step: (draw.rows(2, 3 + step % 2, 4),),
)
simple(
    "recurrence carried in an attribute",
    lambda: Own(_carried, cell=nn.GRUCell(4, 4), state=torch.zeros(3, 4)),
    one,
)


def _carried(m, x):
    out = m.cell(x, m.state)
    m.state = out.detach()
    return out


NORMS = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), one),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), image),
    "BatchNorm without momentum": (lambda: nn.BatchNorm1d(4, momentum=None), one),
    "BatchNorm without statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False), one),
    "LazyBatchNorm": (lambda: nn.LazyBatchNorm1d(), one),
    "GroupNorm": (lambda: nn.GroupNorm(3, 3), image),
    "InstanceNorm": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), image),
    "LayerNorm": (lambda: nn.LayerNorm(4), one),
    "RMSNorm": (lambda: nn.RMSNorm(4), one),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), image),
}
for name, (make, inputs) in NORMS.items():
    before = (lambda: nn.Linear(4, 4)) if inputs is one else (lambda: nn.Conv2d(3, 3, 3, padding=1))
    simple(name, lambda make=make, before=before: Tail(make(), before()), inputs)
simple(
    "BatchNorm to evaluation mode",
    lambda: Tail(nn.BatchNorm1d(4), nn.Linear(4, 4)),
    mutate=lambda m: m.layer.eval(),
)
simple(
    "BatchNorm's statistics reset",
    lambda: Tail(nn.BatchNorm1d(4), nn.Linear(4, 4)),
    mutate=lambda m: m.layer.reset_running_stats(),
)
simple(
    "BatchNorm frozen",
    lambda: Tail(nn.BatchNorm1d(4), nn.Linear(4, 4)),
    mutate=lambda m: m.layer.requires_grad_(False),
)
simple(
    "BatchNorm used twice",
    lambda: Own(lambda m, x: m.norm(m.linear(m.norm(m.linear(x)))), norm=nn.BatchNorm1d(4)),
)
DROPOUTS = {
    "Dropout": (nn.Dropout, one),
    "Dropout in place": (lambda p: nn.Dropout(p, inplace=True), one),
    "AlphaDropout": (nn.AlphaDropout, one),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout, image),
    "Dropout1d": (nn.Dropout1d, sequence),
    "Dropout2d": (nn.Dropout2d, image),
    "Dropout3d": (nn.Dropout3d, lambda draw, step: (draw.rows(1, 2, 4, 4, 4),)),
    "RReLU": (lambda p: nn.RReLU(), one),
}
for name, (make, inputs) in DROPOUTS.items():
    for p in (0.3, 1.0):
        simple(
            f"{name} {p}",
            lambda make=make, p=p: Own(
                lambda m, x: (m.drop(m.act(x)), m.scale * 2),
                drop=make(p),
                act=nn.Tanh(),
                scale=nn.Parameter(torch.ones(2)),
            ),
            lambda draw, step, inputs=inputs: tuple(
                t.detach().requires_grad_() for t in inputs(draw, step)
            ),
        )
simple(
    "dropout of a function",
    lambda: Own(lambda m, x: functional.dropout(m.linear(x), 0.4, m.training)),
)
simple(
    "dropout twice of one layer",
    lambda: Own(lambda m, x: m.drop(m.linear(m.drop(x))), drop=nn.Dropout(0.4)),
)
simple(
    "dropout switched off",
    lambda: Own(lambda m, x: m.drop(m.linear(x)), drop=nn.Dropout(0.4)),
    mutate=lambda m: m.drop.eval(),
)
simple(
    "stochastic depth by rows",
    lambda: Own(
        lambda m, x: (
            x + m.linear(x) * torch.bernoulli(torch.full((x.shape[0], 1), 0.5, device=x.device))
        )
    ),
)
RANDOM = {
    "randn_like": lambda x: torch.randn_like(x),
    "rand": lambda x: torch.rand(x.shape, device=x.device),
    "randint": lambda x: torch.randint(0, 3, x.shape, device=x.device),
    "randperm": lambda x: torch.randperm(x.shape[0], device=x.device)[:, None].float(),
    "multinomial": lambda x: torch.multinomial(x.exp(), 2)[:, :1].float(),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "gumbel": lambda x: functional.gumbel_softmax(x, hard=True),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "poisson": lambda x: torch.poisson(x.exp()),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "Normal.rsample": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    "Categorical": lambda x: torch.distributions.Categorical(logits=x).sample()[:, None].float(),
    "trunc_normal": lambda x: nn.init.trunc_normal_(torch.empty_like(x)),
}
for name, draw_of in RANDOM.items():
    simple(
        f"draws: {name}",
        lambda draw_of=draw_of: Own(lambda m, x: m.linear(x) + draw_of(m.linear(x))),
    )


def attention(**options):
    return nn.MultiheadAttention(4, 2, batch_first=True, **options)


def attend(**arguments):
    def forward(m, x):
        given = {k: v(x) if callable(v) else v for k, v in arguments.items()}
        return m.attention(x, x, x, **given)

    return forward


causal = lambda x: torch.triu(torch.ones(5, 5, dtype=torch.bool, device=x.device), 1)  # noqa: E731
padding = lambda x: x[:, :, 0] > 2  # noqa: E731
ATTENTION = {
    "": ({}, {}),
    " with dropout": ({"dropout": 0.2}, {}),
    " causal": ({}, {"attn_mask": causal, "need_weights": False}),
    " causal flag": ({}, {"attn_mask": causal, "is_causal": True, "need_weights": False}),
    " padding": ({}, {"key_padding_mask": padding}),
    " additive mask": (
        {},
        {
            "attn_mask": lambda x: torch.zeros(5, 5, device=x.device).masked_fill(
                causal(x), float("-inf")
            )
        },
    ),
    " with added zeros": ({"add_zero_attn": True, "add_bias_kv": True}, {}),
    " weights of each head": ({}, {"average_attn_weights": False}),
    " other sizes of keys": ({"kdim": 4, "vdim": 4}, {"need_weights": False}),
}
for name, (options, arguments) in ATTENTION.items():
    simple(
        f"MultiheadAttention{name}",
        lambda options=options, arguments=arguments: Own(
            attend(**arguments), attention=attention(**options)
        ),
        sequence,
    )
for causal_flag in (False, True):
    simple(
        f"scaled_dot_product_attention, causal {causal_flag}",
        lambda causal_flag=causal_flag: Own(
            lambda m, x: functional.scaled_dot_product_attention(
                m.linear(x)[:, None], x[:, None], x[:, None], is_causal=causal_flag, dropout_p=0.1
            )
        ),
        sequence,
    )


def layer(kind, **options):
    return kind(4, 2, dim_feedforward=8, batch_first=True, **options)


for name, options in {
    "": {},
    " norm first": {"norm_first": True},
    " gelu, no dropout": {"activation": "gelu", "dropout": 0.0},
    " without biases": {"bias": False},
}.items():
    simple(
        f"TransformerEncoder{name}",
        lambda options=options: nn.TransformerEncoder(
            layer(nn.TransformerEncoderLayer, **options), 2, enable_nested_tensor=False
        ),
        sequence,
    )
    simple(
        f"TransformerDecoder{name}",
        lambda options=options: nn.TransformerDecoder(
            layer(nn.TransformerDecoderLayer, **options), 2
        ),
        lambda draw, step: (draw.rows(2, 5, 4), draw.rows(2, 3, 4, grad=True)),
    )
simple(
    "Transformer",
    lambda: nn.Transformer(4, 2, 1, 1, 8, batch_first=True),
    lambda draw, step: (draw.rows(2, 5, 4), draw.rows(2, 3, 4)),
)
simple(
    "TransformerEncoder with a padding mask",
    lambda: Own(
        lambda m, x: m.encoder(x, src_key_padding_mask=padding(x)),
        encoder=nn.TransformerEncoder(
            layer(nn.TransformerEncoderLayer), 1, enable_nested_tensor=False
        ),
    ),
    sequence,
)
EMBEDDINGS = {
    "Embedding": lambda: nn.Embedding(11, 4),
    "Embedding with padding": lambda: nn.Embedding(11, 4, padding_idx=0),
    "Embedding with max_norm": lambda: nn.Embedding(11, 4, max_norm=1.0),
    "Embedding scaled by frequency": lambda: nn.Embedding(11, 4, scale_grad_by_freq=True),
    "sparse Embedding": lambda: nn.Embedding(11, 4, sparse=True),
    "EmbeddingBag": lambda: nn.EmbeddingBag(11, 4),
    "EmbeddingBag, sums": lambda: nn.EmbeddingBag(11, 4, mode="sum"),
    "EmbeddingBag, max": lambda: nn.EmbeddingBag(11, 4, mode="max"),
    "sparse EmbeddingBag": lambda: nn.EmbeddingBag(11, 4, mode="sum", sparse=True),
}
for name, make in EMBEDDINGS.items():
    simple(name, lambda make=make: Tail(make(), after=nn.Linear(4, 4)), words)
simple(
    "EmbeddingBag with offsets",
    lambda: nn.EmbeddingBag(11, 4, mode="sum"),
    lambda draw, step: (draw.ids(7), torch.tensor([0, 2, 2, 5], device=draw.device)),
)
PARAMETRIZED = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "pruned": lambda made: prune.l1_unstructured(made, "weight", 3),
}
for name, apply in PARAMETRIZED.items():
    simple(name, lambda apply=apply: Tail(apply(nn.Linear(4, 4))))
simple(
    "spectral_norm removed",
    lambda: Tail(parametrizations.spectral_norm(nn.Linear(4, 4))),
    mutate=lambda m: nn.utils.parametrize.remove_parametrizations(m.layer, "weight"),
)
simple(
    "parametrization added",
    lambda: Tail(nn.Linear(4, 4)),
    mutate=lambda m: nn.utils.parametrize.register_parametrization(m.layer, "weight", _Half()),
)
simple(
    "parametrization cached",
    lambda: Tail(parametrizations.spectral_norm(nn.Linear(4, 4))),
    call=lambda m, a: _cached(m, a),
)
MISC = {
    "product over a dimension": (lambda: Own(lambda m, x: m.linear(x).prod(1)), one),
    "Bilinear": (lambda: Own(lambda m, x: m.b(x, m.linear(x)), b=nn.Bilinear(4, 4, 2)), one),
    "PReLU": (lambda: Tail(nn.PReLU(4), nn.Linear(4, 4)), one),
    "softmax and log": (lambda: Tail(nn.LogSoftmax(-1), nn.Linear(4, 4)), one),
    "LazyLinear": (lambda: nn.LazyLinear(3), one),
    "ReLU in place": (lambda: Tail(nn.ReLU(inplace=True), nn.Linear(4, 4)), one),
    "Hardtanh in place": (lambda: Tail(nn.Hardtanh(inplace=True), nn.Linear(4, 4)), one),
    "GLU": (lambda: Tail(nn.GLU(), nn.Linear(4, 8)), one),
    "Conv1d": (lambda: nn.Conv1d(5, 3, 3), sequence),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 2, 3, 2), image),
    "Conv2d, groups and dilation": (
        lambda: nn.Conv2d(3, 6, 3, groups=3, dilation=2, padding="same"),
        image,
    ),
    "MaxPool with indices": (
        lambda: Own(
            lambda m, x: functional.max_unpool2d(*m.pool(m.conv(x)), 2),
            conv=nn.Conv2d(3, 3, 1),
            pool=nn.MaxPool2d(2, return_indices=True),
        ),
        image,
    ),
    "FractionalMaxPool": (
        lambda: Tail(nn.FractionalMaxPool2d(2, output_ratio=0.5), nn.Conv2d(3, 3, 1)),
        image,
    ),
    "adaptive pooling": (lambda: Tail(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 4, 3)), image),
    "PixelShuffle": (lambda: Tail(nn.PixelShuffle(2), nn.Conv2d(3, 4, 1)), image),
    "Upsample": (
        lambda: Tail(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(3, 2, 3)),
        image,
    ),
    "grid_sample": (
        lambda: Own(
            lambda m, x: functional.grid_sample(m.conv(x), torch.tanh(m.grid), align_corners=False),
            conv=nn.Conv2d(3, 2, 1),
            grid=nn.Parameter(torch.randn(2, 4, 4, 2)),
        ),
        image,
    ),
    "Unfold and Fold": (
        lambda: Own(
            lambda m, x: functional.fold(functional.unfold(m.conv(x), 2), 8, 2),
            conv=nn.Conv2d(3, 3, 1),
        ),
        image,
    ),
    "CosineSimilarity": (
        lambda: Own(lambda m, x: functional.cosine_similarity(m.linear(x), x)),
        one,
    ),
    "CrossEntropyLoss inside": (
        lambda: Own(
            lambda m, x: functional.cross_entropy(m.linear(x), x.argmax(1), label_smoothing=0.1)
        ),
        one,
    ),
    "CTCLoss": (
        lambda: Own(
            lambda m, x: functional.ctc_loss(
                m.linear(x).log_softmax(-1).transpose(0, 1),
                torch.ones(2, 2, dtype=torch.int64, device=x.device),
                (5, 5),
                (2, 2),
            )
        ),
        sequence,
    ),
    "AdaptiveLogSoftmax": (
        lambda: Own(
            lambda m, x: tuple(m.head(m.linear(x), x.argmax(1))),
            head=nn.AdaptiveLogSoftmaxWithLoss(4, 6, [3]),
        ),
        one,
    ),
    "cdist": (lambda: Own(lambda m, x: torch.cdist(m.linear(x), x)), one),
    "sort and gather": (lambda: Own(lambda m, x: m.linear(x).sort(-1).values.cumsum(-1)), one),
    "svd": (lambda: Own(lambda m, x: torch.linalg.svdvals(m.linear(x))), one),
    "matrix inverse": (
        lambda: Own(
            lambda m, x: x @ torch.linalg.inv(m.linear.weight + 4 * torch.eye(4, device=x.device))
        ),
        one,
    ),
    "einsum": (lambda: Own(lambda m, x: torch.einsum("ij,kj->ik", m.linear(x), x)), one_grad),
    "ParameterList": (
        lambda: Own(
            lambda m, x: x * sum(m.scales), scales=nn.ParameterList([torch.ones(4), torch.ones(1)])
        ),
        one,
    ),
    "ParameterDict": (
        lambda: Own(lambda m, x: x * m.scales["a"], scales=nn.ParameterDict({"a": torch.ones(4)})),
        one,
    ),
    "Sequential": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 2)),
        one,
    ),
    "no parameters": (lambda: nn.Tanh(), one_grad),
    "frozen everywhere": (lambda: nn.Linear(4, 4).requires_grad_(False), one_grad),
    "unused parameters": (lambda: Own(lambda m, x: m.linear(x), other=nn.Linear(4, 4)), one),
}
for name, (make, inputs) in MISC.items():
    simple(name, make, inputs)
for name, (function, mutate) in {
    "layer replaced in a Sequential": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
        lambda m: m.__setitem__(1, nn.Sigmoid()),
    ),
    "layer appended to a Sequential": (
        lambda: nn.Sequential(nn.Linear(4, 4)),
        lambda m: m.append(nn.Tanh()),
    ),
    "layer removed from a ModuleList": (
        lambda: Own(_stack, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(3))),
        lambda m: m.layers.__delitem__(1),
    ),
    "layers shuffled": (
        lambda: Own(_stack, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(3))),
        lambda m: setattr(m, "layers", nn.ModuleList([m.layers[2], m.layers[0], m.layers[1]])),
    ),
}.items():
    simple(name, function, mutate=mutate)


def _stack(m, x):
    for made in m.layers:
        x = torch.tanh(made(x))
    return x


class _Half(nn.Module):
    def forward(self, weight):
        return weight * 0.5


def _cached(m, arguments):
    with nn.utils.parametrize.cached():
        return m(*arguments) + m(*arguments) * 0.5
