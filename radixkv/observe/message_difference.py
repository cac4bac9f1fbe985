# SPDX-License-Identifier: Apache-2.0
"""Differences between two forms of one message: another spelling, or a changing part."""

from __future__ import annotations

import re
from collections.abc import Iterable

from radixkv.observe.causes import Breaker, make_breaker
from radixkv.observe.embedded_json import canonical_text, tools_in
from radixkv.observe.image_difference import changed_image
from radixkv.observe.prompt_parts import MessageParts
from radixkv.observe.text_difference import TextDifference, differences, share_in_common
from radixkv.observe.tools_difference import tools_breaker
from radixkv.observe.volatile_text import volatile_text
from radixkv.text.chat_formats.client_rules import CLIENT_RULES

#: Of the shorter text; with less in common two prompts are two prompts, and nothing single breaks them.
MIN_IN_COMMON = 0.3

#: How thoughts in a text begin and end.
_THOUGHTS = (
    *((f"<{name}>", f"</{name}>") for name in ("think", "thinking", "thought", "thoughts", "reasoning")),
    *((f"<{name}>", f"</{name}>") for name in ("analysis", "reflection", "scratchpad")),
    *(("[THINK]", "[/THINK]"), ("<|channel|>analysis<|message|>", "<|end|>")),
    *(("<|begin_of_thought|>", "<|end_of_thought|>"), ("", "</think>")),
)
_ZERO_WIDTH = re.compile(r"[\u200b-\u200f\u2060\ufeff\u00ad]+")
#: Every part is bounded, or stops where the next one may begin: a text of a megabyte is read once.
_IMAGE = re.compile(
    r"!\[[^\]\n]{0,300}\]\([^)\n]{0,2000}\)"
    r"|<(image|img|image_url|input_image)\b[^<>]*>(?:[^<]*</\1>)?"
    r"|data:image/[\w.+-]{1,40};base64,[A-Za-z0-9+/=_-]*"
    r"|[\[(<](?:[^\[\]()<>\n]{0,60}\b)?"
    r"(?:image|picture|screenshot|photo|bild|imagen|immagine|imagem|изображение|图片|图像|画像)"
    r"[^\[\]()<>\n]{0,80}[\])>]"
    r"|https?://[^\s)\"'>]{1,300}\.(?:png|jpe?g|gif|webp|bmp|svg)\b"
    r"|(?<![\w./-])[\w./-]{1,200}\.(?:png|jpe?g|gif|webp|bmp)\b",
    re.I,
)
#: One of them is in every text that `_IMAGE` finds something in: far quicker to look for.
_OF_IMAGES = (
    *(
        "![",
        "image",
        "<img",
        ".png",
        ".jp",
        ".gif",
        ".webp",
        ".bmp",
        ".svg",
        "picture",
        "screenshot",
        "photo",
    ),
    *("bild", "imagen", "immagine", "imagem", "изображение", "图片", "图像", "画像"),
)
_HEADER_LINE = re.compile(r"x-[a-z][a-z0-9-]+:[ \t]*[a-z]\w*=\S", re.I)
_EXAMPLE_HEAD = re.compile(
    r"^[ \t#*<\[\-=_>]*(?:(?:some|here are(?: some| a few)?|few-?shot|worked|sample|good|the "
    r"following|\d+)[\s-]+)*"
    r"(?:examples?|samples?|few-?shots?|demonstrations?|beispiele?|ejemplos?|exemples?|esempi(?:o)?|"
    r"exemplos?|voorbeeld(?:en)?|"
    r"примеры?|示例|例子|例|예시).{0,40}$",
    re.I | re.M,
)
_HEADING = re.compile(r"^(?:#{1,6} |</?\w+>\s*$|[A-ZÄÖÜ][A-ZÄÖÜ \d]{5,}:?\s*$|\*\*[^*]+\*\*:?\s*$)", re.M)
_PAIRS = re.compile(
    r"^\W*(?:Q|A|Input|Output|User|Assistant|Question|Answer|Frage|Antwort)\b\W*\d*\s*[:：]", re.M | re.I
)


def squeezed(text: str) -> str:
    """Return a text without white space and invisible characters."""
    seen = text if text.isascii() else _ZERO_WIDTH.sub("", text)
    return "".join(seen.split())


def parted_thoughts(text: str) -> tuple[str, str]:
    """Split a text into the part without stated thoughts, and the thoughts. O(text)."""
    thoughts = []
    for opening, closing in _THOUGHTS:
        kept, at = [], 0
        while (start := text.find(opening, at)) >= 0:
            end = text.find(closing, start)
            if end < 0:
                break
            kept.append(text[at:start])
            thoughts.append(text[start : end + len(closing)])
            at = end + len(closing)
        text = "".join([*kept, text[at:]])
    return text, "".join(thoughts)


def rewritten(old: MessageParts, new: MessageParts) -> Breaker | None:
    """Name the change of spelling, without change of meaning, of an earlier turn's message; or None."""
    texts = old.text, new.text
    same_calls = old.calls == new.calls
    if same_calls and old.reasoning == new.reasoning and squeezed(old.text) == squeezed(new.text):
        return make_breaker("whitespace", *_white_space(old.text, new.text))
    parted = [parted_thoughts(text) for text in texts]
    bare = [squeezed(text) for text, _ in parted]
    thoughts = [message.reasoning + rest for message, (_, rest) in zip((old, new), parted, strict=True)]
    if bare[0] == bare[1] and thoughts[0] and len(squeezed(thoughts[1])) < len(squeezed(thoughts[0])):
        return make_breaker("thinking_stripped", old=thoughts[0], new=thoughts[1])
    if [name for name, _ in old.calls] == [name for name, _ in new.calls] and old.calls:
        pairs = [(a, b) for (_, a), (_, b) in zip(old.calls, new.calls, strict=True) if a != b]
        if pairs and squeezed(old.text) == squeezed(new.text):
            if all(canonical_text(a) == canonical_text(b) for a, b in pairs):
                return make_breaker("arguments_reserialised", "", *pairs[0])
            return None
    if same_calls and old.text != new.text and old.role != "system":
        canonical = [squeezed(canonical_text(text)) for text in texts]
        if canonical[0] == canonical[1]:
            return make_breaker("arguments_reserialised", "", *_first(differences(*texts)))
    image = changed_image(*texts) if same_calls else None
    if image is not None:
        return make_breaker(image.cause, "", image.old, image.new)
    if same_calls and any(map(_has_image, texts)):
        left = [squeezed(_IMAGE.sub("", text)) for text in texts]
        if left[0] == left[1]:
            return make_breaker("image_replaced", "", *_first(differences(*texts)))
    return None


def _has_image(text: str) -> bool:
    lower = text.lower()
    return any(word in lower for word in _OF_IMAGES) and _IMAGE.search(text) is not None


def _white_space(old: str, new: str) -> tuple[str, str, str]:
    found = differences(old, new)
    parts = (repr(found[0].old_part), repr(found[0].new_part)) if found else ("", "")
    return "", *parts


def _first(found: list[TextDifference]) -> tuple[str, str]:
    return (found[0].old_part, found[0].new_part) if found else ("", "")


def changing(old: str, new: str) -> Breaker:
    """Classify the changing part of a text; `unknown` if it is of no known kind."""
    metadata = _metadata(old, new)
    if metadata is not None:
        return metadata
    tools = tools_in(old), tools_in(new)
    if tools[0] and tools[1]:
        found_tool = tools_breaker(*tools)
        if found_tool is not None:
            return found_tool
    found = differences(old, new)
    if not found:
        return make_breaker("unknown")
    parts = _first(found)
    if share_in_common(old, new) < MIN_IN_COMMON:
        return make_breaker("unknown", "", *parts)
    if squeezed(canonical_text(old)) == squeezed(canonical_text(new)):
        return make_breaker("schema_keys_reordered", "", *parts)
    if _are_examples(found):
        return make_breaker("examples", "", *parts)
    known = volatile_text(found[0])
    if known is not None:
        return make_breaker(known.kind, known.what, *parts)
    return make_breaker("unknown", "", *parts)


def _metadata(old: str, new: str) -> Breaker | None:
    """Name a client's own text at the head of the prompt, if the two part there; or None."""
    heads = [
        next((match for rule in CLIENT_RULES if (match := rule.head.match(text))), None)
        for text in (old, new)
    ]
    lines = [text.partition("\n")[0] for text in (old, new)]
    ends = [len(line) if head is None else head.end() for head, line in zip(heads, lines, strict=True)]
    if not all(head is not None or _HEADER_LINE.match(line) for head, line in zip(heads, lines, strict=True)):
        return None
    one, other = (text[:end] for text, end in zip((old, new), ends, strict=True))
    return None if one == other else make_breaker("client_metadata", "", one, other)


def _are_examples(found: list[TextDifference]) -> bool:
    """Return True if examples differ: much of the text under a heading that announces examples."""
    first = found[0]
    size = sum(len(place.old_part) + len(place.new_part) for place in found)
    if size < 24 or (len(found) == 1 and volatile_text(first) is not None):
        return False
    before = first.lines_before(30)
    line_end = first.new_text.find("\n", first.new[0])
    line = first.new_text[first.new[0] - len(first.label) : line_end if line_end >= 0 else None]
    heads = [match.start() for match in _EXAMPLE_HEAD.finditer(before + line[len(first.label) :])]
    if not heads:
        return _PAIRS.search(line) is not None and _has_pairs(found)
    between = before[heads[-1] :].partition("\n")[2]
    return not any(not _EXAMPLE_HEAD.match(match[0]) for match in _headings(between))


def _headings(text: str) -> Iterable[re.Match[str]]:
    """Headings that end a section of examples: neither tags nor lines that speak of examples."""
    return (
        match
        for match in _HEADING.finditer(text)
        if not match[0].startswith("<") or "/example" in match[0].lower()
    )


def _has_pairs(found: list[TextDifference]) -> bool:
    return any(_PAIRS.search(place.label + place.new_part) for place in found)
