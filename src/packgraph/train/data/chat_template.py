"""Chats as the chat template of a tokenizer writes them, and which characters are learned.

    messages ─▶ template (Jinja, in the sandbox of transformers) ─▶ text
    learned  ─▶ within {% generation %} ... {% endgeneration %}, or else by prefixes:

        all of it    <user>How much?<end><assistant>Two.<end>
        prompt       <user>How much?<end><assistant>            up to where an answer is asked for
        answer                                      Two.<end>   what the answer adds to that

A template may write earlier answers otherwise than the last one (some leave out what a model has
thought): then the words and the end of an answer are looked for at their place. Where a template
writes no end, and the mark of who speaks next ends an answer (GLM), that mark is learned, and is
written behind the last answer.

The invariants: what is learned of a turn holds all its words; the words of every other turn are
written; a field that the template does not read is refused. Where that is not so, the chat is
refused. A template gives the same text each time: its clock stands still at CLOCK, for runs that
go on another day and for shards, and a template that draws at random is refused.
"""

import functools
import hashlib
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from packgraph.models.foreign import naming, read_object, read_text
from packgraph.train.data.rows import valid_text
from packgraph.train.data.source import (
    BadDocumentError,
    DataError,
    Message,
    MissingPackageError,
)

TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
ADDRESS = re.compile(r" at (0x[0-9a-f]+)>")  # of an object of Python, another one each time
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
# Names that transformers reads what a model has thought by.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# Fields of a message that say nothing of its tokens.
ASIDE = frozenset(
    ("id", "message_id", "name", "tool_call_id", "index", "turn", "timestamp", "created_at")
    + ("date", "model", "language", "source", "url", "metadata")
)
CLOCK = datetime(2024, 7, 26)  # the date that templates of Llama 3 fall back to
VARIES = "writes something else each time ({}), so no run could be repeated; remove that"
LONGEST, LARGEST = 10.0, 2**26  # seconds and characters of one chat
# Jinja takes the place of `strftime_now` by this macro, which knows no clock.
FROZEN = (
    "{%- macro strftime_now(format) -%}{%- set ns = namespace(text=format) -%}"
    "{%- for code, value in packgraph_clock -%}"
    "{%- set ns.text = ns.text.replace(code, value) -%}{%- endfor -%}{{- ns.text -}}"
    "{%- endmacro %}\n"
)
DATE_CODES = [
    f"%{dash}{code}" for dash in ("-", "") for code in "aAbBcdDeFHIjklmMpPrRsSTuUVwWxXyYZz"
]
# Arguments of transformers' function that are no template's.
RESERVED = ("conversations", "messages", "documents", "chat_template", "add_generation_prompt") + (
    "continue_final_message",
    "return_assistant_tokens_mask",
    "packgraph_clock",
)
Span = tuple[int, int]  # of characters


def read_options(folder: Path) -> dict[str, Any]:
    """Entries of tokenizer_config.json in a folder, and those special tokens of it that
    special_tokens_map.json alone names. Raises DataError."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = folder / name
        if not os.path.lexists(file):  # a link that leads nowhere is no file that is not there
            continue
        given = read_object(file, DataError, "it stands beside the tokenizer: repair or remove it")
        found |= {key: value for key, value in given.items() if value is not None}
    return found


def token_text(options: Mapping[str, Any], name: str) -> Any:
    """The text of a special token in `read_options`, None where it is not named."""
    found = options.get(name)
    return found.get("content", found) if isinstance(found, dict) else found


class ChatTemplate:
    """Templates of a tokenizer, and the special tokens that they may name.

    Attributes:
        name: Of their file.
        is_dated: They write a date, which is always that of CLOCK.
        fingerprint: Changes when a text would change.
    """

    def __init__(self, templates: Mapping[str, str], special: dict[str, str], name: str) -> None:
        """templates: by name, `default` and perhaps `tool_use`. name: of their file, for
        messages."""
        self._templates, self._special, self.name = templates, special, name
        self.is_dated = "strftime_now" in "".join(templates.values())
        identity = repr((sorted(templates.items()), special, str(CLOCK)))
        self.fingerprint = hashlib.sha256(identity.encode(errors="surrogatepass")).hexdigest()[:16]

    @staticmethod
    def beside(file: Path) -> "ChatTemplate | None":
        """The template beside a tokenizer.json, None where there is none. Raises DataError."""
        folder, templates = file.parent, dict[str, str]()
        options, named = read_options(folder), folder / "tokenizer_config.json"
        given = options.get("chat_template")
        if isinstance(given, str):
            templates["default"] = given
        elif isinstance(given, list):  # several, by name
            for one in given:
                if isinstance(one, dict) and isinstance(one.get("template"), str):
                    templates[str(one.get("name"))] = one["template"]
        files = {
            "default": folder / TEMPLATE,
            "tool_use": folder / MORE_TEMPLATES / "tool_use.jinja",
        }
        for name, own in files.items():
            if os.path.lexists(own):
                named = own if name == "default" else named
                templates[name] = read_text(own, DataError)
        if "default" not in templates:
            return None
        tokens = {name: token_text(options, name) for name in SPECIAL}
        special = {name: text for name, text in tokens.items() if isinstance(text, str)}
        kept = {name: text for name, text in templates.items() if name in files}
        return ChatTemplate(kept, special, str(named))

    def write(
        self,
        messages: Sequence[Message],
        where: str,
        arguments: Mapping[str, Any] | None = None,
        special: frozenset[str] = frozenset(),
    ) -> tuple[str, list[Span]]:
        """Write a chat.

        Args:
            messages: The chat.
            where: The place that it came from.
            arguments: Further ones of the template.
            special: Texts of special tokens, which may end an answer.

        Returns:
            Its text, and the characters of it that are learned.

        Raises:
            BadDocumentError: If the template cannot write it, or leaves something out.
            MissingPackageError: Without transformers, as all methods do.
        """
        arguments = arguments or {}
        self._check_read(messages, where, arguments)
        text, marked = self._render(messages, where, arguments)
        self._check_written(messages, text, where, arguments)
        answers = [index for index, turn in enumerate(messages) if turn.role == "assistant"]
        if MARKS.search(self._chosen(arguments)):
            if len(marked) > len(answers) and all(messages[index].learned for index in answers):
                return text, marked  # several of an answer
            if len(marked) != len(answers):
                raise BadDocumentError(
                    f"{where}: {self.name} marks {len(marked)} answers of an assistant, but the "
                    f"chat has {len(answers)}"
                )
            return text, [span for index, span in zip(answers, marked) if messages[index].learned]
        if mark := self._next_speaker(special):
            text += self._last_mark(messages, text, arguments, special)
        spans = {index: self._answer(messages, index, text, where, arguments) for index in answers}
        if mark:
            spans = {index: _with_mark(span, text, special) for index, span in spans.items()}
        return text, [spans[index] for index in answers if messages[index].learned]

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text that asks for the next answer. Raises BadDocumentError."""
        return self._render(messages, "the chat", {}, asks=True)[0]

    def ending(self, special: frozenset[str]) -> str:
        """Text that ends an answer, such as <|im_end|>: what the template writes behind it, else
        the special token that begins what the user says next; "" where there is neither."""
        return self._ending or self._next_speaker(special)

    @functools.cached_property
    def _ending(self) -> str:
        text, _ = self._probe(Message("user", "question"), Message("assistant", "answer"))
        return text.rpartition("answer")[2].strip()

    def _next_speaker(self, special: frozenset[str]) -> str:
        """The special token that ends an answer by beginning what the user says next; "" where the
        template writes an end of its own."""
        return "" if self._ending else _first_of(special, self._next_turn)

    def _last_mark(
        self,
        messages: Sequence[Message],
        text: str,
        arguments: Mapping[str, Any],
        special: frozenset[str],
    ) -> str:
        """The mark that ends the last message of a chat: that of a tool where it calls one."""
        if messages[-1].role != "assistant":
            return ""
        if not _called(messages[-1]):
            return self._next_speaker(special)
        longer, _ = self._render((*messages, Message("tool", "found")), self.name, arguments)
        after = longer[len(text) :] if longer.startswith(text) else ""
        return _first_of(special, after.lstrip())

    @functools.cached_property
    def _next_turn(self) -> str:
        chat = Message("user", "question"), Message("assistant", "answer")
        text, _ = self._probe(*chat, Message("user", "further"))
        return text.rpartition("answer")[2].partition("further")[0].strip()

    def _probe(self, *messages: Message) -> tuple[str, list[Span]]:
        try:
            return self._render(messages, self.name, {})
        except BadDocumentError:  # it wants other chats
            return "", []

    def _check_read(
        self, messages: Sequence[Message], where: str, arguments: Mapping[str, Any]
    ) -> None:
        """Raise for fields and arguments that the template does not read."""
        with naming(f"{where}: {self.name}", "cannot write it", BadDocumentError):
            json.dumps([arguments, *(message.given for message in messages)])
            fields, variables = _read_by(self._library(), self._chosen(arguments))
        for number, message in enumerate(messages):
            for field in message.given.keys() - ASIDE - {"content"}:
                if fields.isdisjoint(_same(field)):
                    raise BadDocumentError(
                        f"{where}: message {number} has `{field}`, which {self.name} does not "
                        "read; remove it, or use a template that does"
                    )
        for name in arguments:
            if name in RESERVED or name not in variables:
                raise BadDocumentError(
                    f"{where}: {self.name} does not read `{name}`; remove it, or use a template "
                    "that does"
                )

    def _check_written(
        self, messages: Sequence[Message], text: str, where: str, arguments: Mapping[str, Any]
    ) -> None:
        """Raise where something that a chat holds is not in its text."""
        if not all(_holds(text, name) for name in _functions(arguments.get("tools"))):
            raise BadDocumentError(f"{where}: {self.name} leaves out `tools`")
        for number, message in enumerate(messages):
            what = f"{where}: {self.name} leaves out message {number}"
            parts = message.given.get("content")
            if isinstance(parts, list) and (str(parts) in text or json.dumps(parts) in text):
                raise BadDocumentError(f"{what}, whose `content` is a list; write it as one text")
            # Answers are looked for at their place; templates may leave out what they begin with.
            if message.role != "assistant" and not _holds(text, message.content.strip()):
                raise BadDocumentError(f"{what}, of the {message.role}")
            if not all(_holds(text, name) for name in _called(message)):
                raise BadDocumentError(f"{what}: what it calls")
            if parts is None and "content" in message.given and "None" in text:
                empty = replace(message, given={**message.given, "content": ""})
                bare = (*messages[:number], empty, *messages[number + 1 :])
                if self._render(bare, where, arguments)[0].count("None") < text.count("None"):
                    raise BadDocumentError(
                        f"{where}: {self.name} writes `None` for message {number}, whose `content` "
                        'is null; write ""'
                    )
            for field in message.given.keys() - ASIDE - {"content"}:
                if message.given[field] and not self._shows(messages, number, field, arguments):
                    raise BadDocumentError(f"{what}: its `{field}`")

    def _shows(
        self, messages: Sequence[Message], number: int, field: str, arguments: Mapping[str, Any]
    ) -> bool:
        """Tells whether a field of a message changes the text. It may do so at the end of a chat
        alone: templates leave out earlier thoughts."""
        own = messages[number]
        given = {name: own.given[name] for name in own.given.keys() - _same(field)}
        for after in ((), messages[number + 1 :]):
            chats = [(*messages[:number], one, *after) for one in (own, replace(own, given=given))]
            try:
                one, other = (self._render(chat, self.name, arguments)[0] for chat in chats)
            except BadDocumentError:  # it cannot do without it
                return True
            if one != other:
                return True
        return False

    def _answer(
        self,
        messages: Sequence[Message],
        index: int,
        text: str,
        where: str,
        arguments: Mapping[str, Any],
    ) -> Span:
        """The characters of an answer: its words and what ends it."""
        before, message = messages[:index], messages[index]
        asked, _ = self._render(before, where, arguments, asks=True)
        start = len(asked)
        if not text.startswith(asked):  # some ask for more than they write of earlier answers
            pairs = enumerate(zip(asked, text))
            start = next((n for n, (one, other) in pairs if one != other), len(text))
            if start < len(self._render(before, where, arguments)[0]):
                start = len(text)  # what stands before it is written otherwise
        bare = {name: value for name, value in message.given.items() if name not in THOUGHTS}
        needed = [message.content.strip()] if message.content.strip() else _called(message)
        for own in (message, replace(message, given=bare)):
            told, _ = self._render((*before, own), where, arguments)
            answer = told[start:].rstrip() if told.startswith(text[:start]) else ""
            # What a template puts before the words of the last answer may be missing here.
            for place in range(len(answer)):
                if not text.startswith(answer[place : place + 8], start):
                    continue
                rest = answer[place:]
                if all(words in rest for words in needed) and text.startswith(rest, start):
                    return start, start + len(rest)
        raise BadDocumentError(
            f"{where}: {self.name} writes message {index} otherwise within this chat than at "
            "its end, so what is learned of it cannot be told; mark answers in the template "
            "with {% generation %} and {% endgeneration %}"
        )

    def _library(self) -> Any:
        try:
            importlib.import_module("jinja2.meta")
            return importlib.import_module("transformers.utils.chat_template_utils")
        except ImportError as error:
            raise MissingPackageError(
                f"{self.name}: a chat template needs the packages `transformers` and `jinja2`: "
                "pip install transformers jinja2"
            ) from error

    def _chosen(self, arguments: Mapping[str, Any]) -> str:
        """The template for these arguments, chosen as transformers does."""
        name = "tool_use" if "tools" in arguments and "tool_use" in self._templates else "default"
        return self._templates[name]

    def _render(
        self,
        messages: Sequence[Message],
        where: str,
        arguments: Mapping[str, Any],
        *,
        asks: bool = False,
    ) -> tuple[str, list[Span]]:
        library = self._library()
        template = self._chosen(arguments)
        options: dict[str, Any] = {**self._special, **arguments}
        if self.is_dated:
            template = FROZEN + template
            options["packgraph_clock"] = [(code, CLOCK.strftime(code)) for code in DATE_CODES]
        try:
            with naming(f"{where}: {self.name}", "cannot write it", BadDocumentError), _limited():
                texts, spans = library.render_jinja_template(
                    [[_fields(turn) for turn in messages]],
                    chat_template=template,
                    return_assistant_tokens_mask=MARKS.search(template) is not None,
                    add_generation_prompt=asks,
                    **options,
                )
        except _TemplateError as error:
            raise DataError(f"{where}: {self.name} {error}") from error
        except RecursionError as error:  # met in the trace of a line, say
            raise BadDocumentError(
                f"{where}: {self.name}: cannot write it: nested too deeply"
            ) from error
        if len(texts[0]) > LARGEST:
            raise BadDocumentError(f"{where}: {self.name} writes {len(texts[0]):,} characters")
        found = ADDRESS.search(texts[0])
        if found and found[1] not in f"{messages} {arguments}":
            raise DataError(f"{where}: {self.name} {VARIES.format(found[1])}")
        valid_text(texts[0], f"{where}: what {self.name} writes")
        return texts[0], [(start, stop) for start, stop in (spans[0] if spans else ())]


def _fields(message: Message) -> dict[str, Any]:
    """A message as a template gets it, thoughts under all their names."""
    found = {"role": message.role, "content": message.content, **message.given}
    thought = next((found[name] for name in THOUGHTS if name in found), None)
    if thought is not None:
        found = {"thinking": thought, **found, "reasoning_content": thought}
    return found


def _holds(text: str, words: str) -> bool:
    """A text has these words, as they are or within a text of JSON."""
    return words in text or json.dumps(words, ensure_ascii=False)[1:-1] in text


@functools.cache
def _read_by(library: Any, template: str) -> tuple[frozenset[str], frozenset[str]]:
    """Names that a template may read of a message, and variables that it reads."""
    jinja: Any = importlib.import_module("jinja2.meta")
    tree = library._compile_jinja_template(template).environment.parse(template)
    nodes = jinja.nodes
    fields = {node.attr for node in tree.find_all(nodes.Getattr)}
    fields |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(fields), frozenset(jinja.find_undeclared_variables(tree))


def _same(field: str) -> frozenset[str]:
    """The names of a field of a message."""
    return frozenset(THOUGHTS if field in THOUGHTS else (field,))


def _called(message: Message) -> list[str]:
    """Names of the functions that a message calls."""
    return _functions(message.given.get("tool_calls"))


def _functions(given: Any) -> list[str]:
    """Names of functions in a list of calls or tools."""
    found = [one.get("function", one) for one in given or () if isinstance(one, Mapping)]
    names = [one.get("name") for one in found if isinstance(one, Mapping)]
    return [name for name in names if isinstance(name, str)]


def _first_of(special: frozenset[str], text: str) -> str:
    """The longest of some texts that `text` begins with, "" if it begins with none."""
    return max((one for one in special if one and text.startswith(one)), key=len, default="")


def _with_mark(span: Span, text: str, special: frozenset[str]) -> Span:
    """The characters of an answer and of the special token that follows it, white space between
    them included."""
    behind = text[span[1] :]
    mark = _first_of(special, behind.lstrip())
    return (span[0], len(text) - len(behind.lstrip()) + len(mark)) if mark else span


class _TemplateError(Exception):
    """Raised where a template loops or draws at random."""


@contextmanager
def _limited() -> Iterator[None]:
    """Raise _TemplateError in a template that runs for longer than LONGEST, or draws at random.

    Lines of the template are traced: no signal, which would need the main thread, and no process.
    """
    before, end = sys.gettrace(), time.monotonic() + LONGEST

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > end:
            raise _TemplateError(
                f"takes more than {LONGEST:.0f} seconds to write it; does it loop? Repair it"
            )
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_globals.get("__name__") == "random":
            raise _TemplateError(VARIES.format(f"random.{frame.f_code.co_name}"))
        return line if frame.f_code.co_filename == "<template>" else None

    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)
