"""Rows of JSON lines and of tables as documents: which columns are read, and what of a chat is
learned.

    row ─▶ the first of these that has a value ─▶ SourceDocument
             a column that `data.text_column` names, other than `text`
             input_ids, chosen and rejected, prompt and completion, messages, conversations, text

Columns of a chat (`system`, `tools`, `chat_template_kwargs`) and all fields of a message go to the
chat template, as `apply_chat_template` of transformers gets them. The invariant: a field or column
that says what is learned is followed or refused. Other columns are left unread, and are told
(`SourceDocument.unread`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from packgraph.packing.document import COLUMNS
from packgraph.train.config.reading import SHOWN, shown
from packgraph.train.data.source import (
    ROLES,
    BadDocumentError,
    DocumentSource,
    Message,
    SourceDocument,
)

TEXT = "text"
MOST_NAMED = 8  # columns in one message
LOOKED_AT = 100  # rows, for notes
# Roles that a chat template may know besides.
MORE_ROLES = ("developer", "function", "ipython")
# Who speaks in ShareGPT's `conversations`, as roles.
SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
PREFERENCES = ("chosen", "rejected")
FORMS = ("input_ids", "chosen", "completion", "messages", "conversations", TEXT)
# Fields that say whether a message is learned, and the value that says yes.
MARKS = dict.fromkeys(("weight", "train", "trainable", "loss", "loss_mask"), True) | {
    "masked": False
}
CHAT_COLUMNS = ("system", "tools", "chat_template_kwargs")
# Columns that say what of tokens is learned.
LABELS = ("labels", "completion_mask", "assistant_masks")


def document_of_row(
    row: Mapping[str, Any], where: str, text_column: str, *, paired: bool = False
) -> SourceDocument:
    """The document of one JSON object or table row: text, a chat, an answer to a prompt, a
    preference, or tokens. paired: only a preference, of which both answers are learned from. Raises
    BadDocumentError naming `where`."""
    form = _form(row, text_column)
    if form is None:
        raise BadDocumentError(
            f"{where}: expected `{text_column}`, `messages`, `conversations`, `prompt` and "
            f"`completion`, `chosen` and `rejected`, or `input_ids`, found {named(sorted(row))}. "
            "Another column can be named by data.text_column"
        )
    _check_marks(row, form, where)
    if paired and form != "chosen":
        raise BadDocumentError(
            f"{where}: a loss of pairs (loss.name) needs `chosen` and `rejected`, but this row is "
            f"read by `{form}`"
        )
    if form == "input_ids":
        return SourceDocument(where, row=row, unread=_unread(row, form))
    found = replace(_read(row, form, where), is_pair=paired)
    if found.messages is not None:
        found = _with_chat_columns(found, row, where)
        if found.rejected is not None:
            found = replace(found, rejected=_with_chat_columns(found.rejected, row, where))
    elif form != text_column and (given := [name for name in CHAT_COLUMNS if _has(row, name)]):
        raise BadDocumentError(
            f"{where}: `{given[0]}` is of a chat, but `{form}` is a text; write both as messages"
        )
    return replace(found, unread=_unread(row, form))


def _form(row: Mapping[str, Any], text_column: str) -> str | None:
    """The column that decides what a row is; None = there is none."""
    forms = FORMS if text_column == TEXT else (text_column, *FORMS[:-1])
    there = [name for name in forms if row.get(name) is not None]
    if "completion" in there and row.get("prompt") is None:
        there.remove("completion")
    if "chosen" not in there and row.get("rejected") is not None:
        there.append("chosen")  # refused by name
    filled = [name for name in there if _has(row, name)]
    return next(iter(filled or there), None)


def _has(row: Mapping[str, Any], name: str) -> bool:
    """A value that says something: joined data sets fill columns that a row lacks."""
    value = row.get(name)
    return value is not None and not (isinstance(value, (str, list, dict)) and not value)


def _unread(row: Mapping[str, Any], form: str) -> tuple[str, ...]:
    """Columns with a value that were not read."""
    wanted = ("label",) if row.get("label") in (True, 1) else ()
    partners = {"chosen": ("prompt", "rejected"), "completion": ("prompt", *wanted)}
    read = {form, *CHAT_COLUMNS, *partners.get(form, ())}
    read = {*COLUMNS} if form == "input_ids" else read
    return tuple(name for name in row if name not in read and _has(row, name))


def _check_marks(row: Mapping[str, Any], form: str, where: str) -> None:
    """Raise for columns by which a row is not learned, or only some tokens of it, other than those
    of tokens."""
    said = [name for name, yes in MARKS.items() if _has(row, name) and row[name] != yes]
    said = [name for name in (*LABELS, *said) if _has(row, name)]
    said = [name for name in said if form != "input_ids" or name not in COLUMNS]
    if said:
        raise BadDocumentError(
            f"{where}: the column `{said[0]}` ({shown(row[said[0]])}) says what is learned of "
            f"`{form}`, and is not followed; write it into messages, give `input_ids` with "
            "`labels`, or remove it"
        )


def _read(row: Mapping[str, Any], form: str, where: str) -> SourceDocument:
    if form == "chosen":
        return _preference(row, where)
    if form == "completion":
        if row.get("label") in (False, 0) and row.get("label") is not None:
            raise BadDocumentError(
                f"{where}: `label` is false, so `completion` is an answer that is not wanted; "
                "remove such rows, or leave them out by --data.on-bad skip"
            )
        return _answered(row["prompt"], row["completion"], where, "completion")
    if form == "messages":
        return SourceDocument(where, messages=_messages(row["messages"], where))
    if form == "conversations":
        return SourceDocument(where, messages=_conversations(row["conversations"], where))
    return SourceDocument(where, text=valid_text(row[form], f"{where}: `{form}`"))


def _with_chat_columns(
    document: SourceDocument, row: Mapping[str, Any], where: str
) -> SourceDocument:
    """A chat with what stands beside it: what its system says, tools, arguments of its template."""
    messages, arguments = document.messages or (), dict[str, Any]()
    if _has(row, "system"):
        text = valid_text(row["system"], f"{where}: `system`")
        first = messages[0]
        if first.role not in ("system", "developer"):
            messages = (Message("system", text), *messages)
        elif first.content != text:
            raise BadDocumentError(
                f"{where}: `system` and the first message differ; leave one of them out"
            )
    if _has(row, "tools"):
        arguments["tools"] = _tools(row["tools"], where)
    options = row.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping):
        raise BadDocumentError(f"{where}: `chat_template_kwargs` must be an object")
    # A table fills what a row lacks with None.
    arguments |= {name: value for name, value in options.items() if value is not None}
    return replace(document, messages=messages, arguments=arguments)


def _tools(given: Any, where: str) -> list[Any]:
    """Descriptions of tools: a list, or JSON of one."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise BadDocumentError(f"{where}: `tools` is not JSON ({error})") from error
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise BadDocumentError(f"{where}: `tools` must be a list of objects, or JSON of one")
    return found


def _messages(messages: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise BadDocumentError(
            f'{where}: `messages` must be a list of {{"role", "content"}} with at least one entry'
        )
    return tuple(
        _message(message, f"{where}: message {number}") for number, message in enumerate(messages)
    )


def _message(message: Any, name: str) -> Message:
    """One message with all its fields."""
    fields = message if isinstance(message, Mapping) else {}
    fields = {str(key): value for key, value in fields.items() if value is not None}
    role, content = fields.pop("role", None), fields.pop("content", None)
    # An assistant may call tools and say nothing.
    silent = content is None and role == "assistant" and bool(fields.keys() - MARKS.keys())
    if (
        not isinstance(message, Mapping)
        or "role" not in message
        or not (silent or "content" in message)
    ):
        raise BadDocumentError(
            f"{name} must be an object with `role` and `content`, got {str(message)[:80]!r}"
        )
    if role not in (*ROLES, *MORE_ROLES):
        raise BadDocumentError(f"{name} has role {shown(role)}; known roles: {', '.join(ROLES)}")
    learned = _learned(fields, role, name)
    given = {key: value for key, value in fields.items() if key not in MARKS}
    if silent:
        return Message(role, "", learned, {"content": None, **given})
    if isinstance(content, list):
        words = _joined(content, f"{name}, content")
        return Message(role, words, learned, {"content": content, **given})
    return Message(role, valid_text(content, f"{name}, content"), learned, given)


def _joined(parts: Sequence[Any], name: str) -> str:
    """The text of a content that is a list of parts."""
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise BadDocumentError(f"{name} has a part {shown(kind)}; only texts are trained on")
    return "".join(valid_text(part.get("text"), f"{name}, text") for part in parts)


def _learned(fields: Mapping[str, Any], role: str, name: str) -> bool:
    """Tells whether marks make a message learned; True without any."""
    said = {}
    for mark, yes in MARKS.items():
        if mark not in fields:
            continue
        value = fields[mark]
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise BadDocumentError(
                f"{name} has `{mark}`: {shown(value)}; a message is learned or not, 0 or 1"
            )
        said[mark] = bool(value) is yes
    if len(set(said.values())) > 1:
        raise BadDocumentError(f"{name}: {' and '.join(f'`{mark}`' for mark in said)} disagree")
    if any(said.values()) and role != "assistant":
        raise BadDocumentError(
            f"{name} is of the {role} and is to be learned by `{next(iter(said))}`; only what the "
            "assistant says is learned"
        )
    return all(said.values())


def _conversations(turns: Any, where: str) -> tuple[Message, ...]:
    """The messages of ShareGPT's list of {"from", "value"}."""
    if not isinstance(turns, list) or not turns:
        raise BadDocumentError(
            f'{where}: `conversations` must be a list of {{"from", "value"}} with at least one '
            "entry"
        )
    found = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
            found.append(turn)  # of `messages`, or refused as one
            continue
        speaker = turn["from"]
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            raise BadDocumentError(
                f"{where}: turn {number} is from {shown(speaker)}; known are {', '.join(SPEAKERS)}"
            )
        others = {key: value for key, value in turn.items() if key not in ("from", "value")}
        found.append({**others, "role": SPEAKERS[speaker], "content": turn["value"]})
    return _messages(found, where)


def _answered(prompt: Any, answer: Any, where: str, name: str) -> SourceDocument:
    """Two texts, or two parts of a chat, of which the second is predicted. name: of its column."""
    if isinstance(prompt, list) != isinstance(answer, list):
        raise BadDocumentError(
            f"{where}: `prompt` and `{name}` must both be texts, or both lists of messages"
        )
    if not isinstance(prompt, list):
        text = valid_text(answer, f"{where}: `{name}`")
        return SourceDocument(where, text=text, prompt=valid_text(prompt, f"{where}: `prompt`"))
    asked = _messages(prompt, where) if prompt or name == "completion" else ()
    turns = tuple(replace(turn, learned=False) for turn in asked)
    return SourceDocument(where, messages=(*turns, *_messages(answer, where)))


def _preference(row: Mapping[str, Any], where: str) -> SourceDocument:
    """The chosen answer, and beside it the rejected one. Without `prompt` (the implicit form of
    TRL), or with one as text beside whole chats, it is what both begin with."""
    given: Any = row.get("prompt")
    chosen: Any = row.get("chosen")
    rejected: Any = row.get("rejected")
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise BadDocumentError(
            f"{where}: `chosen` and `rejected` must both be texts, or both lists of messages"
        )
    if not isinstance(chosen, list):
        chosen = valid_text(chosen, f"{where}: `chosen`")
        rejected = valid_text(rejected, f"{where}: `rejected`")
    if given is None or (isinstance(given, str) and isinstance(chosen, list)):
        shared = _shared(chosen, rejected)
        given, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if not chosen or not rejected:
        raise BadDocumentError(
            f"{where}: `chosen` or `rejected` has no answer; where one of them begins with the "
            "other, name what both answer as `prompt`"
        )
    found, other = (
        _answered(given, answer, where, name)
        for name, answer in zip(PREFERENCES, (chosen, rejected), strict=True)
    )
    return replace(found, rejected=other)


def _shared(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Length of two answers' common start (characters or messages), without a space before
    words."""
    pairs = zip(chosen, rejected, strict=False)
    shared = next(
        (place for place, (one, other) in enumerate(pairs) if one != other),
        min(len(chosen), len(rejected)),
    )
    return shared - (isinstance(chosen, str) and chosen[:shared].endswith(" "))


def valid_text(value: Any, name: str) -> str:
    """`value`, if it is a text that UTF-8 can hold. Raises BadDocumentError naming it."""
    if not isinstance(value, str):
        raise BadDocumentError(f"{name} must be a text, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadDocumentError(
            f"{name} is not valid Unicode ({error.reason} at character {error.start})"
        ) from error
    return value


def row_notes(documents: DocumentSource) -> list[str]:
    """Notes on the first rows: columns that are not read, and that of a preference the chosen
    answer alone is learned."""
    unread, preference = dict[str, str](), ""
    for index in range(min(len(documents), LOOKED_AT)):
        try:
            found = documents[index]
        except BadDocumentError:  # left out, or named when its turn comes
            continue
        unread |= {name: found.where for name in found.unread if name not in unread}
        preference = preference or (found.where if found.rejected and not found.is_pair else "")
    notes = [f"{next(iter(unread.values()))}: not read: {named([*unread])}"] if unread else []
    if preference:
        notes.append(
            f"{preference}: a preference. Training is on the chosen answer alone, by the loss of "
            "its tokens; for a loss of both say --loss.name dpo"
        )
    return notes


def named(names: Sequence[str]) -> str:
    """Lists names of columns, the first ones of many."""
    cut = [name if len(name) <= SHOWN else f"{name[:SHOWN]}…" for name in names[:MOST_NAMED]]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(cut) + more or "nothing"
