r"""Updates of all parameters, which never make the host wait; each replica updates its own part of
them, by the rules that `--optimizer.name` names (`updates/`).

The learning rate is a device tensor (a captured or queued kernel reads its newest value), clipping
stays on the device, weight decay touches only parameters with two or more dimensions that are no
bias. Under bfloat16 weights the optimizer keeps float32 masters: an update smaller than half a
bfloat16 step would otherwise be lost. For the same reason gradients of a step's microbatches are
added up in float32, unless `--optimizer.gradients` says otherwise. They have no copy: a kernel
reads them as they are, or rules copy and clip a piece at a time. The invariant: parameters and
gradients are views of flat buffers that never move (`parallel/data.py`), so captured graphs may
read and add to them.

The learning rate is a pure function of the step: linear warm-up, then decay to a floor, by a
cosine, in a line, or in a line at the end (`wsd`: warm-up, stable, decay).

peak        /‾‾\_               /‾‾‾‾‾‾‾\
           /     ‾\_           /         \
floor     /         ‾‾‾‾‾     /           ‾‾‾
          0  warm-up  decay   0       wsd     steps
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from packgraph.graphs.backend import profiler_range
from packgraph.graphs.choose import make_copy_streams
from packgraph.graphs.parameters import local_tensor, set_gradient_dtype
from packgraph.parallel.data import FlatParameters
from packgraph.parallel.flat_buffers import WHOLE, GradientBucket
from packgraph.parallel.layout import Shard
from packgraph.parallel.mesh import Mesh, single_process
from packgraph.parallel.pieces import part_of
from packgraph.parallel.pipeline.links import tie_groups
from packgraph.torch_internals import norm_each
from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.features.moe import ExpertBalance, Overflow
from packgraph.train.spikes import Limits
from packgraph.train.updates.adafactor import Adafactor
from packgraph.train.updates.adamw import AdamW
from packgraph.train.updates.adamw8bit import AdamW8bit
from packgraph.train.updates.host_state import PIECE, HostState
from packgraph.train.updates.muon import Muon, is_hidden_matrix
from packgraph.train.updates.rule import Updated, UpdateRule, slices_of

TINY = 1e-6  # added to the norm when clipping, as in torch.nn.utils.clip_grad_norm_
NARROW_SUMS = 16  # microbatches of a rank: sums of so many in bfloat16 are off by half a percent
CHANGED_SUMS = (
    "gradients of a step were added up in {before} so far, and are in {now} from here on: steps "
    "have other bits; --optimizer.gradients {before} goes on as before"
)


def warn_of_sums(dtype: str, microbatches: int) -> str | None:
    """A warning where gradients of so many microbatches are added up too narrowly, or None."""
    if dtype != "bfloat16" or microbatches <= NARROW_SUMS:
        return None
    return (
        f"warning: gradients of {microbatches} microbatches are added up in bfloat16, which loses "
        "what is small beside the sum: --optimizer.gradients float32, or larger capacities"
    )


def learning_rate_of(options: OptimizerConfig, run_steps: int, step: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0, of a run of so many steps.

    The first step of a warm-up of n has peak/n, its last step the peak. The cosine (Loshchilov and
    Hutter 2017, SGDR, without restarts) reaches its floor at `decay_steps` and stays there; so do a
    line (`linear`), and one in the last `decay_share` of the steps after the warm-up (`wsd`, Hu et
    al. 2024, arXiv:2404.06395). `constant` stays at the peak.
    """
    peak, warmup, schedule = options.learning_rate, options.warmup_steps, options.schedule
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    span = max(1, (options.decay_steps or run_steps) - warmup)
    progress, floor = min(1.0, (step - warmup) / span), options.min_learning_rate_fraction
    if schedule == "cosine":
        return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
    share = options.decay_share if schedule == "wsd" else 1.0
    return peak * (floor + (1 - floor) * min(1.0, (1.0 - progress) / share))


class Optimizer:
    """Updates of named parameters that live on one device, by rules for spans of flat buffers.

    mesh: where the processes are, all of which make an optimizer; the ranks that hold copies of
    a parameter share the work and the state, and what several stages along `pp` hold by the same
    name is one parameter. Making an optimizer moves the
    parameters into flat buffers, so make it before graphs are captured.
    """

    balance: ExpertBalance | None = None  # moves the routers' biases, as a part of every update
    overflow: Overflow | None = None  # says on the device when an update must change nothing
    guard: Tensor | None = (
        None  # limits of loss, norm and least norm, beyond which an update changes nothing: `watch`
    )

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        mesh: Mesh | None = None,
        layers: Mapping[str, int] | None = None,
        shard: Shard = "none",
        *,
        resident: int = 0,
        sums_apart: bool = False,
    ) -> None:
        """layers, shard, sums_apart: as in `FlatParameters`. resident: bytes of state that may stay
        on the device with `config.offload`."""
        self._mesh, named = mesh or single_process(), list(named_parameters)
        for _, parameter in named:
            narrow = config.gradients == "bfloat16"
            wide = torch.promote_types(parameter.dtype, torch.float32)
            set_gradient_dtype(parameter, parameter.dtype if narrow else wide)
        ties = tie_groups(
            self._mesh, [name for name, parameter in named if parameter.requires_grad]
        )
        parts = {part.copies for _, parameter in named if (part := part_of(parameter)) is not None}
        matrices = (
            {name for name, parameter in named if is_hidden_matrix(name, parameter)}
            if config.name == "muon"
            else set[str]()
        )
        self.flat = FlatParameters(
            named,
            self._mesh.group("copies"),
            ties=ties,
            parts={copies: self._mesh.group(copies) for copies in parts},
            layers=layers,
            shard=shard,
            apart=matrices,
            within={copies: self._mesh.shard_groups(copies) for copies in (WHOLE, *parts)},
            sums_apart=sums_apart,
        )
        self._clip_norm = config.clip_norm
        device = self.flat.spans[0].parameters.device
        self.learning_rate = torch.tensor(config.learning_rate, dtype=torch.float32, device=device)
        here = [] if config.offload else self.flat.spans  # whose state is on the device
        self._updated = [Updated.of(span) for span in here]
        self._step = torch.zeros((), dtype=torch.float32, device=device)
        self.host_state: HostState | None = None
        if config.offload:
            streams = make_copy_streams(device)
            self.host_state = HostState(self.flat.spans, streams, config, resident)
        self._rules = (
            _rules(self._updated, config, matrices, self.flat.begin_gather)
            if self.host_state is None
            else [self.host_state]
        )
        self.zero_grad()

    def zero_grad(self) -> None:
        """Zero all gradients in place; a gradient that is None gets its place in the buffer
        back."""
        self.flat.zero_gradients()

    def step(self, learning_rate: float, loss: Tensor | None = None) -> Tensor:
        """Reduce, clip and update once. Returns the global gradient norm before clipping, float32
        [] on the device.

        loss: of the step on this replica, float32 [] on the device; needed where there is a
        `guard`.
        """
        with profiler_range("optimizer update"):
            self.set_learning_rate(learning_rate)
            return self.update(loss)

    def watch(self) -> None:
        """From now on updates change nothing whose loss or gradient norm lies outside of
        `set_limits`."""
        self.guard = torch.tensor(Limits(), dtype=torch.float32, device=self.learning_rate.device)
        self.spiked = torch.zeros_like(self.learning_rate)

    def set_limits(self, limits: Limits) -> None:
        """Write the limits of the next update to the device, where there is a `guard`."""
        for number, limit in enumerate(limits if self.guard is not None else ()):
            self.guard[number].fill_(limit)  # type: ignore[index]

    def set_learning_rate(self, learning_rate: float) -> None:
        """Write the rate of the next update to the device, where the update (captured or not) reads
        it."""
        self.learning_rate.fill_(learning_rate)

    @torch.no_grad()
    def update(self, loss: Tensor | None = None) -> Tensor:
        """`step` with the learning rate as it was set. Launches the same work every time, so it can
        be captured."""
        self.flat.reduce()
        norm, total = self._norm(loss)
        scale = None
        if self._clip_norm is not None:
            scale = (self._clip_norm / (norm + TINY)).clamp(max=1.0)
        blocked = self.overflow.agree() if self.overflow is not None else None
        if self.guard is not None:
            assert total is not None
            most_loss, most_norm, least_norm = self.guard.unbind()
            good = (
                (total <= most_loss)
                & (norm <= most_norm)
                & (norm >= least_norm)
                & torch.isfinite(total + norm)
            )
            self.spiked.copy_(~good)
            blocked = self.spiked if blocked is None else torch.maximum(blocked, self.spiked)
        for rule in self._rules:
            rule.step(self.learning_rate, self._step, scale, blocked)
        self._step += 1 if blocked is None else (blocked == 0)
        self.flat.gather()
        if self.balance is not None:
            self.balance.update(None if blocked is None else blocked > 0)
        return norm

    def state_tensors(self) -> dict[str, Tensor]:
        """The state by flat name: `step` and, for each parameter, what its rule keeps, such as
        `NAME.exp_avg` and `.exp_avg_sq`, and under bfloat16 `.master`; whole, or `Pieces` where
        other ranks have the rest; and what `balance` adds. Live, or copies: see `load`."""
        tensors: dict[str, Tensor] = {"step": self._step}
        for rule in self._rules:
            tensors |= rule.state_tensors()
        for each in self._updated:
            if each.has_master:
                tensors |= each.named("master", each.values)
        return tensors | (self.balance.state_tensors() if self.balance is not None else {})

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state_tensors` gave, after values were written into that: some rules
        keep their state in another form."""
        for rule in self._rules:
            rule.load(tensors)

    def gradients(self) -> dict[str, Tensor]:
        """This rank's live gradient buffers by parameter name: what its own microbatches have added
        up; of sharded ones `Pieces` of what those of all ranks have."""
        return {
            member.name: local_tensor(member.gradient)
            if span.sharded_layer is None
            else span.part(member, span.own_gradients)
            for span in self.flat.spans
            for member in span.members
        }

    def _norm(self, loss: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The norm of the gradient of the whole model; what several ranks have copies of counts
        once. Where there is a guard, also the loss of the whole step."""
        counted = [
            span.own_gradients
            for span in self.flat.spans
            if (span.sharded or self._mesh.place["tp"] == 0)
            and (span.tied is None or dist.get_rank(span.sharers) == 0)
        ]
        pieces = [own[part] for own in counted for part in slices_of(own.numel(), PIECE)]
        norms = [
            norm
            for dtype in dict.fromkeys(piece.dtype for piece in pieces)  # else one kernel for each
            for norm in norm_each(
                [piece for piece in pieces if piece.dtype == dtype], 2, dtype=torch.float32
            )
        ] or [torch.zeros_like(self.learning_rate)]
        total = torch.stack(norms).square().sum()
        if self.guard is not None:
            assert loss is not None
            told = loss if self._mesh.tells_loss else torch.zeros_like(loss)
            total = torch.stack([total, told])
        if self._mesh.everyone() is not None:
            dist.all_reduce(total)
        return (total.sqrt(), None) if self.guard is None else (total[0].sqrt(), total[1])


def _rules(
    updated: Sequence[Updated],
    config: OptimizerConfig,
    matrices: Collection[str],
    done: Callable[[GradientBucket], None],
) -> list[UpdateRule]:
    """Makes the update rules of the spans. matrices: names of those of hidden layers, which share
    spans with each other only. done: told of spans whose parameters are new; of others by the end
    alone."""
    if config.name == "adafactor":
        return [Adafactor(updated, config)]
    muon = config.name == "muon"
    chosen = {
        number: each
        for number, each in enumerate(updated)
        if (each.span.members[0].name in matrices if muon else each.span.decays)
    }
    if config.name == "adamw" or not chosen:
        return [AdamW(updated, config, done=done)]
    rest = [each for number, each in enumerate(updated) if number not in chosen]
    special = (Muon if muon else AdamW8bit)([*chosen.values()], config)
    return [AdamW(rest, config, done=done), special]
