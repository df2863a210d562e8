"""What an architecture of transformers is called, and what each field of a DecoderConfig is called
in its config.json.

Fields are named with dots: `latent.kv_rank` is the field of a section.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from packgraph.models.config import DecoderConfig

SHOWN = 80  # characters


class Key(NamedTuple):
    """A key of config.json. default: transformers' own where the key is absent; None = the key is
    required.

    null: our value where it is null; None = it must not be. other: a name that some versions write
    instead.
    """

    name: str
    default: Any = None
    null: Any = None
    other: str = ""


Description = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """One architecture.

    fields: keys by our fields. only: further keys with the one value that is known here, which is
    also their default there. fixed: our fields that are the same in every model of the family.
    rotary: whether it has rotary positions. complete: fills in, from a config.json, the fields that
    no single key says; the reasons why it makes no sense. write: the keys that follow from several
    fields. refuse: why a config is none of this family. renamed: what of our names of tensors is
    another there: patterns, replaced in order. prefixes: what names begin with in files, but for
    the head's; the first one is written.
    """

    architecture: str
    model_type: str
    fields: Mapping[str, Key]
    only: Mapping[str, Any]
    fixed: Mapping[str, Any]
    rotary: bool = True
    complete: Callable[[Description, dict[str, Any]], list[str]] = lambda description, values: []
    write: Callable[[DecoderConfig], dict[str, Any]] = lambda config: {}
    refuse: Callable[[DecoderConfig], list[str]] = lambda config: []
    renamed: tuple[tuple[str, str], ...] = ()
    prefixes: tuple[str, ...] = ("model.",)

    def tensor_name(self, name: str, prefix: str | None = None) -> str:
        """What our tensor `name` (as in a state_dict) is called in a checkpoint whose names begin
        with `prefix`."""
        if name.startswith("lm_head."):
            return name
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return (self.prefixes[0] if prefix is None else prefix) + name


def value_of(config: DecoderConfig, field: str) -> Any:
    """The value of a field by its name with dots."""
    value: Any = config
    for name in field.split("."):
        value = getattr(value, name)
    return value


def kind_of(field: str) -> type:
    """The type of a field by its name with dots."""
    kind: Any = DecoderConfig
    for name in field.split("."):
        kind = kind.__annotations__[name]
    return kind


def cut(value: Any) -> str:
    """A value of a config.json as a message quotes it: not all of a long one."""
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        text = "a number too large to be shown"
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
