"""The entries, a file for each family; importing this registers all of them."""

from corpus.families import (  # noqa: F401
    arguments,
    between,
    code_state,
    complexes,
    effects,
    functions,
    gradients,
    huggingface,
    layers,
    modes,
    names,
    outputs,
    overlooked,
    python_state,
    routing,
    schemes,
    teachers,
    threads,
    writes,
)
