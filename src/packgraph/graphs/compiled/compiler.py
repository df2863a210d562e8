"""torch.compile for stages: the stages of one layer become one piece of compiled code, which all
like layers share.

    stages    embed | attn mlp | attn mlp | ... | head
    pieces    [---]   [------]   [------]         [--]
    code        A         B          B              C        per bucket: shapes are static

Code is shared when the stages are methods of modules of the same class (and `precision`, where they
have one): the module is an argument of the code, so its parameters are inputs. What the code
depends on besides shapes is checked by torch before every call; code that does not fit is compiled
again, counted with its place. The invariants: nothing runs uncompiled in silence (a break in the
graph, or code that would have to be compiled over and over, is a CaptureError at the user's line);
forward and backward are both there after the first call, so that a capture compiles nothing; every
call, replayed or not, runs the same code.
"""

import contextlib
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from packgraph.graphs.checkpointed import FULL, checkpointed, draws
from packgraph.graphs.checks.host_sync import all_is_compiled
from packgraph.graphs.compiled.opaque import CompiledCode, unguarded
from packgraph.graphs.compiled.products import AddingCode, take_products
from packgraph.graphs.compiled.traced import refuse_unsafe_graph, written_inputs
from packgraph.graphs.compiled.uses import ForwardUses, WeightUses
from packgraph.graphs.errors import CaptureError
from packgraph.graphs.fallback import Stats
from packgraph.graphs.front import Code, TracedCode, chain, shapes_of
from packgraph.graphs.stages import CompileUnit, State, saving
from packgraph.graphs.tracing_errors import COMPILE, definition, explained
from packgraph.packing.batch import Field, PackedBatch, layout_of

BACKENDS = ("inductor", "aot_eager")
NEVER_CUDAGRAPHS = {"triton.cudagraphs": False, "triton.cudagraph_trees": False}


class OpenBatch(PackedBatch):
    """A packed batch as compiled code gets it: its tensors are inputs, not views to be made of one
    buffer of bytes.

    Inductor cannot read booleans out of bytes before torch 2.13, and outputs that are views of
    inputs take detours. parts: the tensors by their first byte.
    """

    parts: Mapping[int, torch.Tensor]

    def __init__(self, batch: PackedBatch, parts: Mapping[int, torch.Tensor]) -> None:
        super().__init__(batch.data, batch.capacity, batch.host)
        object.__setattr__(self, "parts", parts)

    @staticmethod
    def of(batch: PackedBatch) -> "OpenBatch":
        """The same batch, without what the host knows of it: a graph would freeze that."""
        fields = [
            value for value in vars(layout_of(batch.capacity)).values() if isinstance(value, Field)
        ]
        parts = {place.start: batch._view(place) for place in fields}
        return OpenBatch(batch.without_lengths(), parts)

    def _view(self, field: Field) -> torch.Tensor:
        return self.parts[field.start]


class Compiler:
    """The compiled code of one graphed module.

    backend: `inductor`, or `aot_eager`, which traces and differentiates but generates no kernels
    (for tests). make: how a function becomes compiled code, if not by this class's own way. stats:
    gets the counts. options: of Inductor; its own graphs stay off whatever they say. Raises
    ValueError for names that torch does not know.

    adds_products: whether gradients of weights may be added to `.grad` by the products that make
    them; set before the first call, and only where nothing but compiled stages uses the weights.
    """

    def __init__(
        self,
        backend: str,
        stats: Stats,
        make: Callable[[Code], Code] | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(
                f"compile={backend!r}: use True, False, options of Inductor, or one of "
                f"{', '.join(BACKENDS)}"
            )
        unknown = sorted(name for name in options if not _is_option(name))
        if unknown:
            raise ValueError(
                f"compile: Inductor has no option {', '.join(unknown)}; see torch._inductor.config"
            )
        self.backend, self.stats, self.options = backend, stats, {**options, **NEVER_CUDAGRAPHS}
        self.adds_products = False
        self._make = make
        self._code: dict[Hashable, Code] = {}
        self._codes: dict[Hashable, list[Code]] = {}
        self._shapes: dict[Hashable, int] = {}
        self._now = ""
        self._uses = WeightUses()
        self._shared: set[int] = set()

    def run(self, pieces: Sequence[CompileUnit], state: State) -> State:
        """Run the stages of a segment on `state`. Raises CaptureError at the user's line for what
        cannot be compiled."""
        if self._uses.now is not None:
            self._uses.now.next_segment()
        opened = {
            key: OpenBatch.of(value)
            for key, value in state.items()
            if isinstance(value, PackedBatch)
        }
        closed = {id(batch): state[key] for key, batch in opened.items()}
        state = state | opened
        modes = tuple([getattr(piece.owner, "training", None) for piece in pieces])
        key = (tuple(pieces), modes, shapes_of(state))
        codes = self._codes.setdefault(key, [])
        with unguarded():
            for piece, code in zip(pieces, list(codes), strict=False):
                state = self._call(piece, code, state)
            for piece in pieces[
                len(codes) :
            ]:  # the first time: what is compiled for depends on what came before
                with _quiet():
                    code = self._code_for(piece, state)
                    state = self._call(piece, code, state)
                codes.append(code)
        return {key: closed.get(id(value), value) for key, value in state.items()}

    def _call(self, piece: CompileUnit, code: Code, state: State) -> State:
        self._now = piece.name
        try:
            if piece.recompute:
                mark = getattr(piece.owner, "offload", None)
                run = partial(_again, code, piece, self._uses)
                return checkpointed(run, state, piece.recompute, mark=mark, compiled=True)
            with saving(piece, state):
                return code(piece.owner, state)
        except (FailOnRecompileLimitHit, TorchDynamoException) as error:
            raise explained(piece, error, COMPILE) from error

    def _code_for(self, piece: CompileUnit, state: State) -> Code:
        """Code of its own for every function and every bucket: torch limits how often one code is
        compiled. An opaque piece is its own code."""
        if piece.opaque:
            return chain(piece)
        shared = (type(piece.owner), piece.methods, getattr(piece.owner, "precision", None))
        key = (shared, getattr(piece.owner, "training", None), shapes_of(state))
        if key not in self._code:
            self._code[key] = (self._make or self._compiled)(chain(piece))
            self._shapes[shared] = self._shapes.get(shared, 0) + 1
            if self._shapes[shared] > 1:
                self.stats.recompiles[f"{piece.name}: other inputs"] += 1
        return self._code[key]

    def _compiled(self, function: Code) -> Code:
        this = weakref.ref(self)

        def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            compiler = this()
            assert compiler is not None, "it has the code that is called"
            started = time.perf_counter()
            code = compiler._build(graph, inputs)
            if traced.traces:
                compiler.stats.recompiles[f"{compiler._now}: other constants"] += 1
            compiler.stats.compiled += 1
            compiler.stats.compile_seconds += time.perf_counter() - started
            return code

        traced = TracedCode(function, backend, lambda: not all_is_compiled())
        return traced

    def _build(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Forward and backward of `graph`, both now, each as CompiledCode."""
        weights = frozenset(
            number for number, value in enumerate(inputs) if isinstance(value, torch.nn.Parameter)
        )
        code_of = partial(
            _code_of, self._uses, self._shared if self.adds_products else None, weights
        )
        with functorch_config.patch(
            force_non_lazy_backward_lowering=True, enable_autograd_cache=False
        ):
            if self.backend == "aot_eager":
                from torch._functorch.partitioners import min_cut_rematerialization_partition

                return aot_autograd(
                    fw_compiler=partial(code_of, as_traced),
                    bw_compiler=partial(code_of, as_traced, is_backward=True),
                    partition_fn=min_cut_rematerialization_partition,
                    keep_inference_input_mutations=True,
                )(graph, inputs)
            from torch._inductor.compile_fx import compile_fx, compile_fx_inner

            inner: Any = partial(code_of, compile_fx_inner)
            return compile_fx(graph, inputs, inner_compile=inner, config_patches=self.options)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Within the block, one forward, it is found out which weights' gradients autograd adds up;
        backwards look it up."""
        outside, forward = self._uses.now, ForwardUses()
        self._uses.now = forward
        try:
            yield
            self._shared |= forward.summed()
        finally:
            self._uses.now = (
                outside  # a forward that is made again in its backward counts for itself
            )


def _code_of(
    uses: WeightUses,
    shared: set[int] | None,
    weights: frozenset[int],
    generate: Callable[..., Any],
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    is_backward: bool = False,
    **options: Any,
) -> Any:
    """The code that `generate` makes of a traced forward or backward. shared: addresses of weights
    of several segments, whose gradients autograd adds up; None = no product adds to gradients.
    weights: inputs that are parameters. No method: torch keeps what it has compiled with, and would
    keep the compiler with all modules in it."""
    refuse_unsafe_graph(graph, inputs)
    products = take_products(graph, weights) if is_backward and shared is not None else []
    if products:
        totals = graph.graph.find_nodes(op="placeholder")[len(inputs) :]
        inputs = [*inputs, *(total.meta["val"] for total in totals)]
    is_random = any(_draws(node) for node in graph.graph.nodes)
    written = written_inputs(graph)  # before code is generated: Inductor rewrites the graph
    function = generate(graph, inputs, is_backward=is_backward, **options)
    code = CompiledCode(
        function,
        "backward" if is_backward else "forward",
        len(inputs),
        written,
        None if is_backward else (uses.note_drawing if is_random else uses.note),
    )
    return code if shared is None or not products else AddingCode(code, products, shared)


def _draws(node: torch.fx.Node) -> bool:
    """Returns whether an operation of a traced graph draws random numbers."""
    operation: Any = node.target
    return isinstance(operation, torch._ops.OpOverload) and draws(operation, node.args, node.kwargs)


def _again(code: Code, piece: CompileUnit, uses: WeightUses, state: State) -> State:
    """Run code that a backward may call again, in its own thread. Raises CaptureError where it
    draws random numbers: they lie inside of it, where nothing keeps them."""
    before = uses.draws
    with unguarded():
        made = code(piece.owner, state)
    if uses.draws > before and piece.recompute == FULL:
        raise CaptureError(
            f"compiled code of {piece.name} is to be recomputed in full and draws random numbers "
            "(dropout), which its backward would draw anew",
            definition(piece),
            "leave out dropout, recompute='full' of these stages, or compile",
        )
    return made


def as_traced(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any
) -> Callable[[list[Any]], Any]:
    """A traced graph as it is."""

    def run(arguments: list[Any]) -> Any:
        taken = list(arguments)
        arguments.clear()
        return graph(*taken)

    return run


def _is_option(name: str) -> bool:
    import torch._inductor.config as known

    return name in known.get_config_copy()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's warning that it looks through functools caches: the functions behind ours
    are pure."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"Dynamo detected a call to a `functools.lru_cache`"
        )
        yield
