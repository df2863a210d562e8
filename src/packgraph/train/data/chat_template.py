"""Chats as the chat template of a tokenizer writes them, and which characters are learned.

    messages ─▶ template (Jinja, in the sandbox of transformers) ─▶ text
    learned  ─▶ within {% generation %} ... {% endgeneration %}, or else by prefixes:

        all of it    <user>How much?<end><assistant>Two.<end>
        prompt       <user>How much?<end><assistant>            up to where an answer is asked for
        answer                                      Two.<end>   what the answer adds to that

A template may write earlier answers otherwise than the last one (some leave out what a model has
thought): then the words and the end of an answer are looked for at their place. The invariant: what
is learned of a turn holds all its words; where that is not so, the chat is refused.
"""

import hashlib
import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packgraph.train.data.source import (
    BadDocumentError,
    DataError,
    Message,
    MissingPackageError,
)
from packgraph.train.run_files import parse_json

TEMPLATE = "chat_template.jinja"
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
Span = tuple[int, int]  # of characters


class ChatTemplate:
    """A template and the special tokens that it may name."""

    def __init__(self, template: str, special: dict[str, str], name: str) -> None:
        """name: of its file, for messages."""
        self._template, self._special, self._name = template, special, name
        self._is_marked = MARKS.search(template) is not None
        self.fingerprint = hashlib.sha256(repr((template, special)).encode()).hexdigest()[:16]

    @staticmethod
    def beside(file: Path) -> "ChatTemplate | None":
        """The template beside a tokenizer.json, None where there is none. Raises DataError."""
        options, config = dict[str, Any](), file.parent / "tokenizer_config.json"
        if config.is_file():
            try:
                options = dict(parse_json(config.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise DataError(f"{config}: not a JSON object ({error})") from error
        named = config
        template = options.get("chat_template")
        if isinstance(template, list):  # several, by name
            named_so = [one for one in template if isinstance(one, dict)]
            template = next(
                (one.get("template") for one in named_so if one.get("name") == "default"), None
            )
        if (file.parent / TEMPLATE).is_file():
            named = file.parent / TEMPLATE
            try:
                template = named.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{named}: not UTF-8 ({error.reason})") from error
        if not isinstance(template, str):
            return None
        special = {}
        for name in SPECIAL:
            token = options.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                special[name] = token
        return ChatTemplate(template, special, str(named))

    def write(self, messages: Sequence[Message], where: str) -> tuple[str, list[Span]]:
        """The text of a chat, and the characters of it that are learned. Raises BadDocumentError,
        and MissingPackageError without transformers, as all methods do."""
        text, marked = self._render(messages, where)
        answers = [index for index, turn in enumerate(messages) if turn.role == "assistant"]
        if self._is_marked:
            if len(marked) != len(answers):
                raise BadDocumentError(
                    f"{where}: {self._name} marks {len(marked)} answers of an assistant, but the "
                    f"chat has {len(answers)}"
                )
            spans = dict(zip(answers, marked, strict=True))
        else:
            spans = {index: self._answer(messages, index, text, where) for index in answers}
        return text, [spans[index] for index in answers if messages[index].learned]

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text that asks for the next answer. Raises BadDocumentError."""
        return self._render(messages, "the chat", asks=True)[0]

    def ending(self) -> str:
        """What ends an answer, such as <|im_end|>; "" where the template says nothing of it."""
        chat = [Message("user", "question"), Message("assistant", "answer")]
        try:
            text, _ = self._render(chat, self._name)
        except BadDocumentError:  # it wants other chats
            return ""
        return text.rpartition("answer")[2].strip()

    def _answer(self, messages: Sequence[Message], index: int, text: str, where: str) -> Span:
        """The characters of an answer: its words and what ends it."""
        asked, _ = self._render(messages[:index], where, asks=True)
        told, _ = self._render(messages[: index + 1], where)
        words, start = messages[index].content.strip(), len(asked)
        place = told.find(words, start)
        if told.startswith(asked) and text.startswith(asked) and place >= 0:
            # What a template puts before the words of the last answer may be missing here.
            for before in (told[start:place], ""):
                answer = before + told[place:].rstrip()
                if text.startswith(answer, start):
                    return start, start + len(answer)
        raise BadDocumentError(
            f"{where}: {self._name} writes message {index} otherwise within this chat than at "
            "its end, so what is learned of it cannot be told; mark answers in the template "
            "with {% generation %} and {% endgeneration %}"
        )

    def _render(
        self, messages: Sequence[Message], where: str, *, asks: bool = False
    ) -> tuple[str, list[Span]]:
        chat = [{"role": turn.role, "content": turn.content} for turn in messages]
        try:
            library: Any = importlib.import_module("transformers.utils.chat_template_utils")
            broken = importlib.import_module("jinja2").TemplateError
        except ImportError as error:
            raise MissingPackageError(
                f"{self._name}: a chat template needs the packages `transformers` and `jinja2`: "
                "pip install transformers jinja2"
            ) from error
        try:
            texts, spans = library.render_jinja_template(
                [chat],
                chat_template=self._template,
                return_assistant_tokens_mask=self._is_marked,
                add_generation_prompt=asks,
                **self._special,
            )
        except (broken, TypeError, ValueError) as error:
            raise BadDocumentError(f"{where}: {self._name} cannot write it: {error}") from error
        return texts[0], [(start, stop) for start, stop in (spans[0] if spans else ())]
