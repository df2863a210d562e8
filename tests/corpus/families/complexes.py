"""FFTs and complex numbers: conjugate and negative bits, real and imaginary views, complex
weights."""

import torch
from corpus.entry import GRADIENT_LAYOUT, Own, add, one, one_grad
from torch import nn

GROUP = "complex"
C = torch.complex64


def weight(*shape):
    return nn.Parameter(torch.randn(shape or (4, 4), dtype=C) * 0.5)


def complexes(draw, step):
    return (torch.complex(draw.rows(), draw.rows()),)


def complex_leaves(draw, step):
    return (torch.complex(draw.rows(), draw.rows()).requires_grad_(),)


def conjugated(draw, step):
    return (torch.complex(draw.rows(), draw.rows()).conj(),)


def case(name, function, inputs=one, **options):
    add(
        GROUP,
        name,
        lambda: Own(function, w=weight(), phase=nn.Parameter(torch.randn(4)), bias=weight(4)),
        inputs,
        **options,
    )


def z(m, x):
    return m.linear(x) * m.bias


FFTS = {
    "fft": lambda h: torch.fft.fft(h),
    "rfft and back": lambda h: torch.fft.irfft(torch.fft.rfft(h), n=4),
    "fft2": lambda h: torch.fft.fft2(h),
    "hfft": lambda h: torch.fft.hfft(h),
    "ihfft": lambda h: torch.fft.ihfft(h),
    "fftshift": lambda h: torch.fft.fftshift(torch.fft.fft(h)),
    "irfft of a conjugate": lambda h: torch.fft.irfft(torch.fft.rfft(h).conj(), n=4),
    "power spectrum": lambda h: torch.fft.rfft(h).abs().square(),
    "norm ortho over rows": lambda h: torch.fft.fft(h, dim=0, norm="ortho"),
    "cross correlation": lambda h: torch.fft.irfft(
        torch.fft.rfft(h) * torch.fft.rfft(h.flip(0)).conj(), n=4
    ),
    "stft": lambda h: torch.stft(
        h.flatten().repeat(3), 8, window=torch.ones(8, device=h.device), return_complex=True
    ),
}
for label, transform in FFTS.items():
    case(label, lambda m, x, transform=transform: transform(m.linear(x)))
OPERATIONS = {
    "conj": lambda m, u: u.conj(),
    "conj, resolved": lambda m, u: u.conj().resolve_conj(),
    "conj of conj": lambda m, u: u.conj().conj(),
    "conj of a transpose (H)": lambda m, u: u.mH,
    "product with its conjugate": lambda m, u: u * u.conj(),
    "matrix product with a conjugate": lambda m, u: u @ m.w.conj(),
    "matrix product with mH": lambda m, u: u @ m.w.mH,
    "imag": lambda m, u: u.imag,
    "real": lambda m, u: u.real,
    "imag of conj": lambda m, u: u.conj().imag,
    "imag of conj, twice": lambda m, u: (u.conj().imag, u.conj().imag * 2),
    "neg of conj": lambda m, u: -u.conj(),
    "view as real": lambda m, u: torch.view_as_real(u),
    "view as real of a resolved conjugate": lambda m, u: torch.view_as_real(
        u.conj().resolve_conj()
    ),
    "abs and angle": lambda m, u: (u.abs(), u.angle()),
    "exp(1j w)": lambda m, u: u * torch.exp(1j * m.phase),
    "polar": lambda m, u: u * torch.polar(m.phase.abs(), m.phase),
    "view as complex": lambda m, u: torch.view_as_complex(u.real.reshape(3, 2, 2).contiguous()),
    "in place": lambda m, u: u.mul_(1j).add_(1),
    "real part written": lambda m, u: (u.real.mul_(2), u)[1],
    "imag of conj written": lambda m, u: (lambda v: (v.imag.add_(1), v)[1])(u.conj().clone()),
    "sum of conj": lambda m, u: u.conj().sum(),
    "softmax of abs": lambda m, u: u.abs().softmax(-1) * u,
    "outer with a conjugate": lambda m, u: torch.einsum("ij,kj->ik", u, u.conj()),
    "vdot": lambda m, u: torch.vdot(u[0], u[1]),
    "detached conj": lambda m, u: u * u.conj().detach(),
    "conj saved, cos": lambda m, u: u.conj().cos() * u.conj(),
    "linalg norm": lambda m, u: torch.linalg.norm(u),
    "solve": lambda m, u: torch.linalg.solve(m.w + 4 * torch.eye(4, device=u.device), u.mH),
    "sqrt of a square": lambda m, u: (u * u).sqrt(),
    "where": lambda m, u: torch.where(u.real > 0, u, u.conj()),
    "concatenated with its conj": lambda m, u: torch.cat([u, u.conj()]),
    "stacked parts": lambda m, u: torch.stack([u.real, u.imag], -1),
    "conj and base": lambda m, u: (u, u.conj()),
    "double": lambda m, u: u.to(torch.complex128).conj(),
    "transposed imag": lambda m, u: u.imag.t(),
    "negative imag view": lambda m, u: (
        u.conj().imag.view(2, 6) if u.conj().imag.is_contiguous() else u.conj().imag.t()
    ),
    "prod": lambda m, u: u[:, :2].prod(1),
    "cumsum": lambda m, u: u.cumsum(0),
    "reciprocal": lambda m, u: 1 / (u + 3),
}
for label, operation in OPERATIONS.items():
    case(label, lambda m, x, operation=operation: operation(m, z(m, x)))
for label, inputs in {
    "complex input": complexes,
    "complex leaf": complex_leaves,
    "conjugated input": conjugated,
    "imaginary part as an input": lambda draw, step: (conjugated(draw, step)[0].imag,),
}.items():
    case(label, lambda m, x: x @ m.w.to(x.dtype) if x.is_complex() else m.linear(x), inputs)
for name, parts in {
    "conjugated in turns": (
        lambda m, x: x @ m.w,
        lambda draw, step: (conjugated if step % 2 else complexes)(draw, step),
    ),
    "conjugated leaf": (
        lambda m, x: x @ m.w,
        lambda draw, step: (conjugated(draw, step)[0].requires_grad_(),),
    ),
    "conj of an input returned": (lambda m, x: (x @ m.w, x.conj()), complex_leaves),
    "conj of a weight returned": (lambda m, x: (m.linear(x), m.w.conj()), one),
    "imag of a weight returned": (lambda m, x: (m.linear(x), m.w.imag), one),
}.items():
    case(name, *parts)
case(
    "conjugated buffer",
    lambda m, x: (m.linear(x) * m.spectrum).real,
    one,
    prepare=lambda m: m.register_buffer(
        "spectrum", torch.exp(1j * torch.arange(4.0)).to(m.w.device).conj()
    ),
    mutate=lambda m: m.spectrum.mul_(1j),
)
case(
    "conjugate held by an attribute",
    lambda m, x: (m.linear(x) * m.held).real,
    one,
    prepare=lambda m: setattr(m, "held", torch.exp(1j * torch.arange(4.0)).to(m.w.device).conj()),
    mutate=lambda m: setattr(m, "held", m.held * 2),
)
for name, (function, loss) in {
    "loss is the real part": (
        lambda m, x: z(m, x).conj(),
        lambda out: (out * out.conj()).real.sum(),
    ),
    "loss of the imaginary part": (
        lambda m, x: z(m, x).conj(),
        lambda out: out.imag.square().sum(),
    ),
    "gradient arrives conjugated": (lambda m, x: z(m, x), lambda out: (out.conj() * 1j).real.sum()),
    "two outputs conjugated differently": (
        lambda m, x: (lambda u: (u.conj(), u * 1j))(z(m, x)),
        lambda out: (out[0].conj() * out[1]).real.sum(),
    ),
}.items():
    case(name, function, loss=loss)
case(
    "double backward friendly phases", lambda m, x: torch.exp(1j * m.phase) * m.linear(x), one_grad
)


class Rotary(nn.Module):
    """Rotary embeddings by complex numbers, from a complex buffer, as Llama's first code has it."""

    def __init__(self, conjugate):
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)
        angles = torch.outer(torch.arange(3.0), torch.tensor([1.0, 0.1]))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        self.conjugate = conjugate

    def forward(self, x):
        turns = self.turns.conj() if self.conjugate else self.turns
        q, k = (
            torch.view_as_real(torch.view_as_complex(layer(x).view(3, 2, 2)) * turns).flatten(1)
            for layer in (self.q, self.k)
        )
        return (q @ k.t()).softmax(-1) @ x


for conjugate in (False, True):
    add(
        GROUP,
        "rotary, conjugated" if conjugate else "rotary",
        lambda conjugate=conjugate: Rotary(conjugate),
        one_grad,
        documented=GRADIENT_LAYOUT,
    )
