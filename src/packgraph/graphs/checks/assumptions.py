"""The page "What a graph assumes about your module", made of the tables that the checks use.

python -m packgraph.graphs.checks.assumptions > docs/assumptions.md
"""

import textwrap
from collections.abc import Iterable
from typing import NamedTuple

from packgraph.graphs.checks.code_reads import AROUND_MODELS, KERNELS, TOOLS
from packgraph.graphs.checks.state_kinds import DEPTH, LARGEST_BYTES, WATCHED, KindRule
from packgraph.graphs.fallback import REASONS

_HEAD = """# What a graph assumes about your module

A replay runs no Python. It launches what was captured, on the memory that was captured. packgraph
therefore compares, before every replay, all that Python code could have changed, and runs the call
eagerly, counted under a reason, or raises an error, where it cannot tell that a replay would equal
the eager call. This page is generated from the tables that the checks use: `python -m
packgraph.graphs.checks.assumptions`.
"""
_EXACT = f"""
## What is compared before every replay

Whatever `forward` reads, found from the module's attributes and from the names in its code: to
{DEPTH} objects within objects, arrays up to {LARGEST_BYTES // 2**20} MiB, and the environment where
code names `os.environ` or `getenv`. A change drops the graphs and captures again, with one warning.
`packgraph.assume_constant(object)` vouches for an object, which is then known by identity alone.

Code that asks `torch.cuda.is_current_stream_capturing()` is told no while it is captured, as in an
eager call. A capture that calls other operations than the eager dry run before it, or gives them
other numbers, is refused.
"""
_TAKEN_AS_IT_IS = """
## What is taken as it is

What torch, numpy, packgraph, the standard library and these packages hold in their Python modules
and classes is not compared; objects that your module holds are, whatever package their class is
from. No layer computes from these, but code of libraries comes upon them by names that it shares
with them, and calls of kernels come upon what a compiler of kernels has made.

"""
_REASONS = """
## Reasons of fallbacks

`packgraph.control(graphed).stats.fallbacks` counts calls that ran eagerly by these names. The first
of every reason that you did not ask for warns once, at your line; with `strict=True` it raises
`CaptureError`.
"""


class Rounding(NamedTuple):
    """A case in which numbers may differ from eager's in the last bits. why: the reason."""

    what: str
    why: str


DIFFERENCES = (
    Rounding(
        "an argument that the module reads twice or more and that your code reads twice or more, "
        "too",
        "autograd sums four gradients in the order in which they come; a graph hands out the sum "
        "of its own",
    ),
    Rounding(
        "a parameter that is used inside and outside of the module, or by several of its calls "
        "that meet in one "
        "backward, while gradients are accumulated",
        "the graph adds to `.grad` by itself, autograd adds the gradient from outside: `(grad + a) "
        "+ b` for "
        "`grad + (a + b)`",
    ),
    Rounding(
        "several calls of one module under one `torch.autocast` block that meet in one backward",
        "eager calls share the cast weights, so their gradients are summed in the lower precision; "
        "graphs cast "
        "for themselves and sum in the parameter's precision, which is more exact (0.3 % measured)",
    ),
    Rounding(
        "a loss that is computed in another thread than the call, from outputs of which one was "
        "computed from "
        "another",
        "autograd numbers operations thread by thread and goes backwards by these numbers, so "
        "eager sums the "
        "gradients of loss and module in another order than in one thread; a graph takes the "
        "loss's sum first",
    ),
    Rounding(
        "arguments that are slices with gaps in memory, expanded, or begin within a tensor at no "
        "multiple of 64 "
        "bytes",
        "they are copied row-major into aligned static memory, and kernels choose by layout and "
        "alignment",
    ),
    Rounding(
        "an infinite gradient of a complex parameter whose `.grad` is None",
        "it is added to a buffer of zeros, and torch multiplies by 1 + 0i before it adds: 0 * inf "
        "is NaN; eager "
        "does so from the second gradient on",
    ),
    Rounding(
        "the memory layout of gradients that `torch.autograd.grad` returns for parameters",
        "it is that of the parameter, as `.grad` has it; eager hands out what the last kernel has "
        "made",
    ),
)

ERRORS = (
    (
        "precision, determinism or another global setting of torch that chooses kernels is changed "
        "between forward and "
        "backward",
        "the backward was captured with the settings of the forward; put it into the same block",
    ),
    (
        "`torch.autograd.grad` asks for the gradient of an output that other outputs were computed "
        "from (together with "
        "those of parameters it is not noticed: that output's gradient then lacks what comes from "
        "the others)",
        "a replay gives it the gradients of your own code only; run such calls under "
        "`packgraph.eager(...)`",
    ),
    (
        "a second backward through one call (`retain_graph=True`)",
        "its saved activations are gone; add the losses first",
    ),
    (
        "`create_graph=True`",
        "a captured backward has no graph of its own; seen in warm-up, calls run eagerly instead",
    ),
    (
        "an output that the backward reads is changed in place between forward and backward",
        "as in eager, which also "
        "raises for tensors that autograd has saved without a need for their values (both parts of "
        "`torch.complex`)",
    ),
    (
        "a parameter, buffer or argument that the backward reads is changed in place between "
        "forward and backward",
        "as in eager; step the optimizer after the last backward",
    ),
    (
        "another set of outputs gets gradients than was ever seen, and the forward cannot be run "
        "again for it (what it "
        "reads was changed, or it reads what it writes)",
        "use the same outputs in the loss during warm-up",
    ),
)

THREADS = (
    (
        "a thread draws from a CUDA device's default generator, by another module with dropout, "
        "say, while another one "
        "captures",
        "torch raises `Offset increment outside graph capture encountered unexpectedly` in the "
        "thread that draws: any "
        "`torch.cuda.graph` puts the default generator into capture mode for the whole process. "
        "Let such threads draw "
        "from a `torch.Generator` of their own, or capture before they begin "
        "(`packgraph.control(graphed).build(...)`)",
    ),
    (
        "a thread adds to the parameters' gradients without the graphed module (it calls the plain "
        "module, or has a "
        "penalty on the weights), while another one replays",
        "a gradient may be lost: packgraph knows of threads by their calls of the graphed module, "
        "of which eager ones "
        "(`packgraph.eager(...)`) count, too",
    ),
    (
        "graphed modules that share parameters are trained in one thread each",
        "likewise: train them in one thread",
    ),
    (
        "a thread draws from a generator that a forward in another thread draws from",
        "as in eager, the order is nobody's. A backward that nobody has captured runs the forward "
        "again: it is an error "
        "if that cannot draw the same numbers; code under a checkpoint within and compiled code "
        "move the generator itself "
        "meanwhile",
    ),
)


def page() -> str:
    """The page, in Markdown."""
    parts = [
        _HEAD,
        _EXACT,
        "\n| what | how | why |\n|---|---|---|\n",
        *map(_row, WATCHED),
        _TAKEN_AS_IT_IS,
        *_wrapped(sorted({*KERNELS, *TOOLS, *AROUND_MODELS})),
        _REASONS,
        "\n| reason | asked for | what to do |\n|---|---|---|\n",
        *(
            f"| {_cell(reason.text)} | {'yes' if reason.asked else 'no'} | {_cell(reason.remedy)} "
            "|\n"
            for reason in sorted(
                REASONS.values(), key=lambda reason: (not reason.asked, reason.text)
            )
        ),
        "\n## Errors in a backward\n\n| what | why, and what to do |\n|---|---|\n",
        *(f"| {_cell(what)} | {_cell(why)} |\n" for what, why in ERRORS),
        "\n## Threads\n\nThreads may share a graphed module: their gradients are summed as "
        "autograd sums "
        "them.\n\n| what | what happens, and what to do |\n|---|---|\n",
        *(f"| {_cell(what)} | {_cell(why)} |\n" for what, why in THREADS),
        "\n## Differences in the last bits\n\nEverything else is bitwise equal where kernels are "
        "deterministic.\n\n| what | why |\n|---|---|\n",
        *(f"| {_cell(known.what)} | {_cell(known.why)} |\n" for known in DIFFERENCES),
    ]
    return "".join(parts)


def _wrapped(names: Iterable[str]) -> list[str]:
    lines = textwrap.wrap(", ".join(f"`{name}`" for name in names), 100, break_on_hyphens=False)
    return [f"{line}\n" for line in lines]


def _row(row: KindRule) -> str:
    return f"| {_cell(row.what)} | {_cell(row.treatment.value)} | {_cell(row.reason)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
