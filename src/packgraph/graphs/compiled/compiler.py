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

A dispatch mode that watches operations cannot look into compiled code. So the rules of a dry run
are applied to the traced operations while they are compiled (`refuse_unsafe_graph`), and the code
presents itself to such a mode as one operation with a schema (`CompiledCode`). Without a mode
nothing stands between autograd and the code.

Each segment of a call has graphs of its own. Its backward adds to `.grad` of weights that no other
segment uses, and returns the gradients of all others, which autograd adds up. Eager calls of the
same code count uses (`WeightUses`) and do the same, so both add in one order.
"""

import contextlib
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._guards import TracingContext

from packgraph.graphs.checkpointed import FULL, checkpointed, draws
from packgraph.graphs.checks.host_sync import (
    LEAVE_OUT,
    WAYS_OUT,
    CodeWatcher,
    all_is_compiled,
    without_watchers,
)
from packgraph.graphs.checks.operations import DATA_DEPENDENT
from packgraph.graphs.compiled.products import AddingCode, take_products
from packgraph.graphs.errors import CaptureError, traced_line
from packgraph.graphs.fallback import Stats
from packgraph.graphs.front import Code, TracedCode, chain, shapes_of
from packgraph.graphs.saved_tensors import in_backward
from packgraph.graphs.stages import CompileUnit, State, saving
from packgraph.graphs.tracing_errors import COMPILE, definition, explained
from packgraph.packing.batch import Field, PackedBatch, layout_of
from packgraph.torch_internals import OpOverload, dispatch_mode, without_dispatch_mode


class CompiledCode:
    """A compiled forward or backward. function: takes a list of tensors and numbers, which it
    empties, and returns a list or tuple. mutated: which of them it changes in place. note: is shown
    the inputs of every call.

    Has what watchers ask an operation of torch for: name, namespace, schema and tags.
    """

    namespace = "packgraph_compiled"
    tags: tuple[torch.Tag, ...] = ()

    def __init__(
        self,
        function: Callable[[list[Any]], Sequence[Any]],
        name: str,
        inputs: int,
        mutated: frozenset[int],
        note: Callable[[Sequence[Any]], None] | None = None,
    ) -> None:
        self.function, self.note = function, note
        self._boxed_call = (
            True  # tells AOTAutograd that it may hand over its list, so that inputs are freed early
        )
        self.overloadpacket = SimpleNamespace(__name__=name)
        self._schema = SimpleNamespace(
            is_mutable=bool(mutated),
            arguments=[
                SimpleNamespace(
                    name=f"input {number}", alias_info=_WRITTEN if number in mutated else None
                )
                for number in range(inputs)
            ],
        )

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        """Run it: on one list, as AOTAutograd calls it, or on the list's entries, as watchers
        do."""
        boxed: list[Any] = (
            arguments[0]
            if len(arguments) == 1 and isinstance(arguments[0], list)
            else list(arguments)
        )
        mode = dispatch_mode()
        if isinstance(mode, CodeWatcher):
            with without_dispatch_mode():
                return mode.__torch_dispatch__(self, (), tuple(boxed), {})
        if self.note is not None:
            self.note(boxed)
        with without_watchers():
            return self.function(boxed)

    def __repr__(self) -> str:
        return f"{self.namespace}.{self.overloadpacket.__name__}"


_WRITTEN = SimpleNamespace(is_write=True)


def written_inputs(graph: torch.fx.GraphModule) -> frozenset[int]:
    """The inputs of an AOTAutograd graph that it writes to: their new values are copied in at its
    end.

    Raises CaptureError for changes that AOTAutograd makes after the code has run.
    """
    context = TracingContext.try_get()
    facts = context.fw_metadata if context is not None else None
    if facts is not None and facts.mutated_inp_runtime_indices:
        raise CaptureError(
            "a tensor from outside is changed in place in a way that compiled code cannot hold "
            "(its "
            "shape, or while it needs a gradient)",
            "",
            f"write to a new tensor. {LEAVE_OUT}",
        )
    places = {node: number for number, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    written = [
        node.args[0]
        for node in graph.graph.nodes
        if node.op == "call_function"
        and node.args
        and getattr(getattr(node.target, "_schema", None), "is_mutable", False)
    ]
    return frozenset(
        places[node] for node in written if isinstance(node, torch.fx.Node) and node in places
    )


def refuse_unsafe_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Raise CaptureError, at the user's line if torch knows it, for the first operation that a
    graph cannot hold.

    inputs: (fake) tensors and numbers that the graph was traced with.
    """
    devices = {value.device.type for value in inputs if isinstance(value, torch.Tensor)}
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        made = node.meta.get("val")
        is_tensor = isinstance(made, torch.Tensor)
        # Indexing by numbers is tagged like indexing by a mask: its shape is known after all.
        is_known = is_tensor and all(isinstance(size, int) for size in made.shape)
        if DATA_DEPENDENT & set(getattr(node.target, "tags", ())) and not is_known:
            raise CaptureError(
                f"{name} waits for the device inside a compiled stage: its result is needed on the "
                "host",
                traced_line(node.stack_trace),
                WAYS_OUT.get(name, LEAVE_OUT),
            )
        elsewhere = made.device.type if is_tensor else "meta"
        if elsewhere != "meta" and devices and elsewhere not in devices:
            raise CaptureError(
                f"{name} makes a tensor on the {elsewhere} inside a compiled stage on "
                f"{' and '.join(sorted(devices))}: a graph would freeze it",
                traced_line(node.stack_trace),
                "make the tensor on the device, or outside of the stage",
            )


class WeightUses:
    """Weights that a forward uses, by address, and their segments.

    now: of the forward that is counted, None where nobody counts. segment: which of its segments
    runs. draws: how often code was called that draws random numbers.
    """

    def __init__(self) -> None:
        self.now: set[tuple[int, int]] | None = None
        self.segment = self.draws = 0

    def note_drawing(self, arguments: Sequence[Any]) -> None:
        """Such code is called, and draws random numbers."""
        self.draws += 1
        self.note(arguments)

    def note(self, arguments: Sequence[Any]) -> None:
        """A forward's code is called; one that a backward makes again uses what it has used."""
        if self.now is not None and not in_backward():
            used = (x for x in arguments if isinstance(x, torch.nn.Parameter))
            self.now |= {(weight.data_ptr(), self.segment) for weight in used}


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
        fields = layout_of(batch.capacity).fields.values()
        parts = {place.start: batch._view(place) for place in fields}
        return OpenBatch(batch.without_lengths(), parts)

    def _view(self, field: Field) -> torch.Tensor:
        return self.parts[field.start]


class Compiler:
    """The compiled code of one graphed module.

    backend: `inductor`, or `aot_eager`, which traces and differentiates but generates no kernels
    (for tests). stats: gets the counts. options: of Inductor; its own graphs stay off whatever they
    say. Raises ValueError for names that torch does not know.

    adds_products: whether gradients of weights may be added to `.grad` by the products that make
    them; set before the first call, and only where nothing but compiled stages uses the weights.
    """

    def __init__(
        self,
        backend: str,
        stats: Stats,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(
                f"compile={backend!r}: use True, False, options of Inductor, or one of "
                f"{', '.join(BACKENDS)}"
            )
        if options:
            import torch._inductor.config as inductor

            if unknown := sorted(options.keys() - inductor.get_config_copy().keys()):
                raise ValueError(
                    f"compile: Inductor has no option {', '.join(unknown)}; see "
                    "torch._inductor.config"
                )
        self.backend, self.stats, self.options = backend, stats, {**options, **NEVER_CUDAGRAPHS}
        self.adds_products = False
        self._code: dict[Hashable, Code] = {}
        self._codes: dict[Hashable, list[Code]] = {}
        self._shapes: dict[Hashable, int] = {}
        self.now = ""
        self._uses = WeightUses()
        self._shared: set[int] = set()

    def run(self, pieces: Sequence[CompileUnit], state: State) -> State:
        """Run the stages of a segment on `state`. Raises CaptureError at the user's line for what
        cannot be compiled."""
        self._uses.segment += 1
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
        with without_watchers():
            for piece, code in zip(pieces, list(codes), strict=False):
                state = self._call(piece, code, state)
            for piece in pieces[
                len(codes) :
            ]:  # the first time: what is compiled for depends on what came before
                with warnings.catch_warnings():
                    # It looks through functools caches: the functions behind ours are pure.
                    warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru")
                    code = self._code_for(piece, state)
                    state = self._call(piece, code, state)
                codes.append(code)
        return {key: closed.get(id(value), value) for key, value in state.items()}

    def _call(self, piece: CompileUnit, code: Code, state: State) -> State:
        self.now = piece.name
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
            self._code[key] = self.compiled(chain(piece))
            self._shapes[shared] = self._shapes.get(shared, 0) + 1
            if self._shapes[shared] > 1:
                self.stats.recompiles[f"{piece.name}: other inputs"] += 1
        return self._code[key]

    def compiled(self, function: Code) -> Code:
        """The compiled code of a function, for one bucket."""
        this = weakref.ref(self)

        def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            compiler = this()
            assert compiler is not None, "it has the code that is called"
            started = time.perf_counter()
            code = compiler.build(graph, inputs)
            if traced.traces:
                compiler.stats.recompiles[f"{compiler.now}: other constants"] += 1
            compiler.stats.compiled += 1
            compiler.stats.compile_seconds += time.perf_counter() - started
            return code

        traced = TracedCode(function, backend, lambda: not all_is_compiled())
        return traced

    def build(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
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
        uses, forward = self._uses, set[tuple[int, int]]()
        outside = uses.now, uses.segment  # a forward made again in its backward counts for itself
        uses.now, uses.segment = forward, 0
        try:
            yield
            segments = Counter(address for address, _ in forward)
            self._shared |= {address for address, count in segments.items() if count > 1}
        finally:
            uses.now, uses.segment = outside


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
    is_random = any(
        isinstance(node.target, OpOverload) and draws(node.target, node.args, node.kwargs)
        for node in graph.graph.nodes
    )
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


def _again(code: Code, piece: CompileUnit, uses: WeightUses, state: State) -> State:
    """Run code that a backward may call again, in its own thread. Raises CaptureError where it
    draws random numbers: they lie inside of it, where nothing keeps them."""
    before = uses.draws
    with without_watchers():
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
