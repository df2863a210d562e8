"""A chat with what a run has trained, to try it.

    checkpoint ─▶ export to a temporary folder ─▶ transformers ─▶ likeliest token after token

It goes through the export, so what answers is what others will load.
"""

import importlib
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from packgraph.train.config.command_line import options_help, parse_arguments
from packgraph.train.config.reading import ConfigError
from packgraph.train.config.values import CommandArguments, option
from packgraph.train.data import Tokenizer, build_tokenizer
from packgraph.train.data.source import Message
from packgraph.train.export import config_of, export
from packgraph.train.features.live import transformers_module

CHAT_USAGE = """\
usage: packgraph chat RUN [--best] [--prompt TEXT] [--text] [--tokens N]

Try what was trained: exports the newest checkpoint of a run to a temporary folder, and answers with
transformers, always the likeliest token, on the CPU. Without --prompt every line of the input is a
turn of one chat."""


@dataclass(frozen=True, kw_only=True)
class ChatArguments(CommandArguments):
    """Arguments of `packgraph chat`."""

    run: Path = option(
        Path(), "folder of the run, such as runs/NAME", positional=True, required=True
    )
    best: bool = option(False, "the checkpoint with the lowest loss instead of the newest")
    prompt: str | None = option(None, "answer this alone, and end", metavar="TEXT")
    text: bool = option(False, "go on with what is given as a text, not as a chat")
    tokens: int = option(200, "tokens of an answer at most", metavar="N")


class Chat:
    """Answers greedily, and remembers the turns."""

    def __init__(
        self, model: Any, tokenizer: Tokenizer, *, tokens: int, is_text: bool = False
    ) -> None:
        """model: of transformers. tokens: of an answer at most. is_text: what is given is a text to
        go on with."""
        self._model, self._tokenizer = model.eval(), tokenizer
        self._tokens, self._is_text = tokens, is_text
        self._turns: list[Message] = []

    @staticmethod
    @contextmanager
    def of_run(
        run: Path, *, tokens: int, is_text: bool = False, best: bool = False
    ) -> Iterator["Chat"]:
        """With the newest or best checkpoint of the run in a folder. Raises what `export`
        raises."""
        config = config_of(run)
        library = transformers_module()
        tokenizer = build_tokenizer(config.data)
        logging: Any = importlib.import_module("transformers.utils.logging")
        logging.disable_progress_bar()
        with tempfile.TemporaryDirectory() as folder:
            export(run, Path(folder) / "weights", best=best)
            model = library.AutoModelForCausalLM.from_pretrained(
                Path(folder) / "weights", local_files_only=True, dtype="auto"
            )
        yield Chat(model, tokenizer, tokens=tokens, is_text=is_text)

    @torch.no_grad()
    def answer(self, prompt: str) -> str:
        """Returns the model's answer to `prompt`."""
        if self._is_text:
            ids = self._tokenizer.start(prompt)
        else:
            self._turns.append(Message("user", prompt))
            ids = self._tokenizer.ask(self._turns)
        found = self._model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=self._tokens,
            do_sample=False,
            eos_token_id=list(self._tokenizer.ends) or None,
            pad_token_id=(self._tokenizer.ends or (0,))[0],
        )
        text = self._tokenizer.decode(found[0, len(ids) :].tolist())
        if not self._is_text:
            self._turns.append(Message("assistant", text))
        return text


def chat_command(words: list[str]) -> int:
    """`packgraph chat` with these words; the exit code. Raises ConfigError and what `export`
    raises."""
    asked = parse_arguments(words, ChatArguments()).own
    if asked.help:
        print(f"{CHAT_USAGE}\n{options_help(ChatArguments())}")
        return 0
    if asked.tokens < 1:
        raise ConfigError([f"--tokens must be at least 1, got {asked.tokens}"])
    with Chat.of_run(asked.run, tokens=asked.tokens, is_text=asked.text, best=asked.best) as chat:
        if asked.prompt is not None:
            print(chat.answer(asked.prompt))
            return 0
        for line in sys.stdin:
            if line.strip():
                print(chat.answer(line.rstrip("\n")), flush=True)
    return 0
