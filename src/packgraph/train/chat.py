"""A chat with what a run has trained, to try it.

    checkpoint ─▶ export to a temporary folder ─▶ transformers ─▶ likeliest token after token

It goes through the export, so what answers is what others will load.
"""

import importlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from packgraph.train.data import Tokenizer, build_tokenizer
from packgraph.train.data.source import Message
from packgraph.train.export import config_of, export
from packgraph.train.features.live import transformers_module


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
    def of_run(run: Path, *, tokens: int, is_text: bool = False) -> Iterator["Chat"]:
        """With the newest checkpoint of the run in a folder. Raises what `export` raises."""
        config = config_of(run)
        library = transformers_module()
        tokenizer = build_tokenizer(config.data)
        logging: Any = importlib.import_module("transformers.utils.logging")
        logging.disable_progress_bar()
        with tempfile.TemporaryDirectory() as folder:
            export(run, Path(folder) / "weights")
            model = library.AutoModelForCausalLM.from_pretrained(
                Path(folder) / "weights", local_files_only=True, dtype="auto"
            )
        yield Chat(model, tokenizer, tokens=tokens, is_text=is_text)

    @torch.no_grad()
    def answer(self, prompt: str) -> str:
        """What the model says to `prompt`."""
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
