# SPDX-License-Identifier: Apache-2.0
"""Kinds of short texts that change from prompt to prompt: a time, an id, a path, a person's name.

A text is classified by its own form and by the words around it, in several languages; words of dates are in
date_words.toml. The unknown stays unknown: capital letters alone make no name.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from radixkv.observe.text_difference import TextDifference

MAX_CHARS = 300  # of a value
_CONTEXT = 40  # characters before and after a cut that are looked at
_LANGUAGES = tomllib.loads(Path(__file__).with_name("date_words.toml").read_text(encoding="utf-8"))


def _date_words(kind: str) -> frozenset[str]:
    """Return words of dates of all languages."""
    return frozenset(word for words in _LANGUAGES.values() for word in words.get(kind, ()))


_WEEKDAYS = _date_words("weekdays")
_DATE_NAMES = _date_words("months") | _WEEKDAYS
_DATE_FILLER = _date_words("filler")
_SEPARATORS = re.compile(r"[\s.,:;/+\-–—()'’°，、。年月日時时分秒午前後上下號号は]+")

_ISO_DATE = r"\d{4}-\d\d?-\d\d?"
_ISO_TIME = r"[T _]\d\d?[:.-]?\d\d(?:[:.-]?\d\d(?:[.,]\d+)?)?(?: ?(?:Z|UTC|GMT|[+-]\d\d:?\d\d))?"
_CLOCK = r"[T _,]{1,2}\d\d?:\d\d(?::\d\d)?"
_TIMES = (
    ("a timestamp", re.compile(rf"(?<![\w-]){_ISO_DATE}{_ISO_TIME}(?!\w)", re.ASCII)),
    ("a date", re.compile(rf"(?<![\w-]){_ISO_DATE}(?:{_ISO_TIME})?(?!\w)", re.ASCII)),
    ("a timestamp", re.compile(r"(?<!\w)\d{8}[T_-]?\d{4,6}(?:\.\d+)?Z?(?!\w)", re.ASCII)),
    ("a date", re.compile(r"(?<!\w)\d{4}(?:-W\d\d(?:-\d)?|-[0-3]\d\d)(?!\w)", re.ASCII)),
    (
        "a date",
        re.compile(
            rf"(?<![\w./])\d{{1,2}}[./-]\d{{1,2}}[./-](?:\d{{4}}|\d\d)(?:{_CLOCK})?(?![\w/]|\.\d)", re.ASCII
        ),
    ),
    ("a date", re.compile(rf"(?<![\w./])\d{{4}}[./]\d{{1,2}}[./]\d{{1,2}}(?:{_CLOCK})?(?!\w)", re.ASCII)),
    ("a date", re.compile(r"\d{2,4} ?[年년] ?\d{1,2} ?[月월](?: ?\d{1,2} ?[日號号일])?")),
    (
        "a time",
        re.compile(r"(?<![\w:])\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?[ap]\.?m\.?)?(?![\w:])", re.I | re.A),
    ),
    (
        "a time",
        re.compile(r"(?<![\w.])\d{1,2}(?:\.\d\d)? ?(?:h|[ap]\.?m\.?|uhr)(?: ?\d\d)?(?![a-z\d])", re.I | re.A),
    ),
    ("a time", re.compile(r"(?<![\w.])\d{1,2} ?h ?\d\d ?m(?:in)?(?: ?\d\d ?s)?(?!\w)", re.I | re.A)),
    ("a date", re.compile(r"(?<!\w)(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:[0-2]\d|3[01])(?!\w)", re.ASCII)),
    # A word between a day and a year is a month in some language.
    ("a date", re.compile(r"(?<!\w)\d{1,2}\.? (?:de |of )?[^\s\d]{3,12},? (?:de )?(?:19|20)\d\d(?!\d)")),
    ("a time", re.compile(r"\d{1,2} ?[時时点點시](?: ?\d\d? ?[分분])?")),
)
_EPOCH = re.compile(r"(?<![\w.])(?:1[0-9]|2[0-4])\d{8}(?:\d{3}|\d{6}|\d{9})?(?:\.\d+)?(?!\w)", re.ASCII)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_YEAR = re.compile(r"(?<!\w)(?:19|20)\d\d(?!\w)", re.ASCII)
_SAYS_YEAR = re.compile(rf"(?:{'|'.join(sorted(_date_words('year')))})\W*(?:is|ist|es|est|è|é)?\W*\Z", re.I)

_UUID = re.compile(
    r"(?<![0-9a-zA-Z])(?:[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}|[0-9a-fA-F]{32})(?![0-9a-zA-Z])"
)
_OPAQUE = re.compile(r"(?<![\w-])[A-Za-z0-9](?:[A-Za-z0-9]|[_\-.:#](?=[A-Za-z0-9]))*(?![\w-])")
#: What may stand between the word and the value.
_ID_LINK = (
    r"(?:s?[\s_-]*(?:ids?|uuid|guid|number|num|nr|no|key|hash|token|code|is|was|nummer|kennung|n[oº°]|"
    r"号|號|番号|编号))*"
    r"[\s:：=#\"'`<>(\[{_./|*-]*\Z"
)
_ID_LABELS = tuple(
    (what, re.compile(rf"(?:{words}){_ID_LINK}", re.I))
    for what, words in (
        (
            "a session id",
            r"sessions?|sess|conversation|thread[\s_-]?id|chat[\s_-]?id|sitzung|gespräch|sesi[oó]n|"
            r"sessione|sessão|"
            r"conversaci[oó]n|сессия|сеанс|сессии|会话|會話|セッション|세션",
        ),
        (
            "a request id",
            r"requests?|req|trace|tracing|correlation|invocation|turn[\s_-]?id|call[\s_-]?id|"
            r"anfrage|solicitud|"
            r"requ[eê]te|demande|richiesta|pedido|requisição|запрос|запроса|请求|請求|リクエスト|요청",
        ),
        (
            "an id",
            r"\bids?|[_-]id|uuid|guid|identifier|\brun|\bjob|\bbuild|\btask|ticket|\border|nonce|instance|"
            r"container|\bpod|\bpid|revision|commit|\bsha|\bhash|etag|fingerprint|transaction|\bcase|kennung|vorgang|"
            r"dossier|номер|编号|番号|번호",
        ),
    )
)

_COLOUR = re.compile(r"(?:[0-9a-f]{6}|[0-9a-f]{8})", re.I)

_PATH = re.compile(r"""(?<![\w:/\\.])(?:[A-Za-z]:[\\/]|\\\\|~?/|\.\.?/|file:///?)[^\s"'`<>|,;()\[\]{}*]+""")
#: Where people and their programs work. Other paths may be routes of an API.
_HOME = re.compile(
    r"[A-Za-z]:[\\/]|\\\\|~/|file:|/(?:home|users|tmp|var|workspaces?|mnt|srv|root|opt|usr|data|"
    r"private|volumes|"
    r"code|repos?|builds?|sandbox|github|etc|run|scratch|projects?|src|media|nfs|export|w|work)(?:/|\Z)",
    re.I,
)
#: Relative ones, too, and the beginning of those with blanks; after words that speak of a folder.
_FOLDERS = re.compile(r"""(?<![\w:])(?:[A-Za-z]:[\\/]|[~.\w-]*[\\/])[\w.~-]+(?:[\\/][\w.~-]+)*""")
_SAYS_FOLDER = re.compile(
    r"cwd|pwd|working.?dir|directory|workspace|workdir|folder|\bpath\b|\broot\b|repo|project|checkout|"
    r"work(?:ing|s)? in|you are in|verzeichnis|ordner|arbeits|"
    r"carpeta|directorio|dossier|répertoire|cartella|pasta|diretório|каталог|"
    r"папк|目录|目錄|ディレクトリ|フォルダ|폴더",
    re.I,
)

_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_HANDLE = re.compile(r"(?<![\w@])@[A-Za-z][\w.-]+")
_TITLE = r"(?:(?:Mr|Mrs|Ms|Mx|Dr|Prof|Herr|Frau|Señora?|Sra?|Mme|M)\.? +)?"
_NAME_WORD = r"[^\W\d_a-zа-яß-öø-ÿ][\w'’.-]*"
_PARTICLE = r"(?:(?:van|von|de|da|del|der|di|bin|ibn|al|el|la|le|ter)[ -])*"
_NAME = re.compile(rf"{_TITLE}{_NAME_WORD}(?:[ \u3000·]{_PARTICLE}{_NAME_WORD}){{0,3}}")
_LOGIN = re.compile(r"[A-Za-z][\w.-]*")
_NAME_BEFORE = re.compile(
    r"(?:\b(?:user(?:s|'s)?(?:[ _-]?name)?|(?:full|first|last|given|family|display|preferred|nick)[ "
    r"_-]?name|name|"
    r"named|called|customer|client|caller|member|employee|student|patient|guest|owner|author|"
    r"account(?: holder)?|"
    r"operator|login|hello|hi|hey|dear|welcome(?: back)?|greet|greetings|help(?:s|ing)?|assist(?:s|ing)?|"
    r"assistant (?:to|of|for)|speak(?:s|ing)? (?:with|to)|"
    r"good (?:morning|afternoon|evening)|assigned to|"
    r"talk(?:s|ing)? (?:with|to)|chat(?:s|ting)? with|behalf of|work(?:s|ing)? for|(?:signed|"
    r"logged)[ -]in(?: as)?|"
    r"requested by|belongs to|made for|prepared for|tutor(?:ing)?|coach(?:ing)?|mr|mrs|ms|mx|dr|prof|"
    r"schüler(?:in)?|benutzer(?:in|name)?|nutzer(?:in|name)?|kund(?:e|in)|name des nutzers|hallo|"
    r"liebe[r]?|herr|frau|hilfst|hei(?:ß|ss)(?:e|t)|s['’]appelle|"
    r"usuari[oa]|client[ea]|hola|nombre|se llama|ayudas? a|utilisat(?:eur|rice)|bonjour|nom|"
    r"pr[ée]nom|aide[sz]?|"
    r"utente|ciao|nome|si chiama|usuári[oa]|olá|gebruiker|naam|klant|hoi|użytkownik|imię|klient|"
    r"kullanıcı|käyttäjä|användare|bruke?r|bruger|uživatel|"
    r"пользовател\w*|клиент\w*|имя|зовут|здравствуйте|привет)\b|利用者|المستخدم|اسم|用户名?|用戶名?|姓名|名字|客户|客戶|你好|您好|"
    r"ユーザー名?|お客様|氏名|名前|こんにちは|사용자|이름|고객)"
    r"(?:[ \t]*(?:as|>|is|are|was|ist|es|est|è|é|:|=|：|,|，|-|–|\"|'|`|“|「|\*|_|\(|the|user|named|"
    r"called|der|die|das|la|el|le|"
    r"是|叫|は|으로|name))*[ \t]*\Z",
    re.I,
)
_NAME_AFTER = re.compile(
    r"\A(?:['’]s\b|,? (?:is (?:the|a|your|our|an) (?:user|customer|client|member|employee|student|"
    r"patient|guest|owner|"
    r"developer|engineer|manager|operator|administrator|person)|"
    r"(?:has|is) (?:signed|logged) in|asked|needs help|"
    r"(?:ist|war) angemeldet|est connecté|ha iniciado)|さん|様|先生|님|女士|先生)",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Volatile:
    """Kind of a text that changes from request to request.

    Attributes:
        kind: `timestamp`, `id`, `working_directory` or `user_name`.
        what: in words, as `a date`.
    """

    kind: str
    what: str


def volatile_text(found: TextDifference) -> Volatile | None:
    """Classify a difference by its form and the words around it; None: nothing known."""
    if max(len(found.old_part), len(found.new_part)) > MAX_CHARS:
        return None
    return _path(found) or _labelled_id(found) or _time(found) or _user(found) or _opaque_id(found)


def _covers(match: re.Match[str], start: int, end: int) -> bool:
    """Return True if a match contains all of a difference, or touches an empty one from both sides."""
    return match.start() <= start and match.end() >= end and match.end() > match.start()


def _matches(pattern: re.Pattern[str], found: TextDifference) -> list[str]:
    """Return the matches of a pattern where the texts differ, in both of them; empty: not in both."""
    values = []
    for text, start, end in found.sides():
        value = next((match[0] for match in pattern.finditer(text) if _covers(match, start, end)), None)
        if value is None:
            return []
        values.append(value)
    return values if values[0] != values[1] else []


def _path(found: TextDifference) -> Volatile | None:
    values = _matches(_PATH, found)
    if not values:
        in_paths = all(
            any(match.start() <= start < match.end() for match in _FOLDERS.finditer(text))
            for text, start, _ in found.sides()
        )
        names_folder = in_paths and _SAYS_FOLDER.search(found.label)
        return Volatile("working_directory", "a working directory") if names_folder else None
    if all(map(_HOME.match, values)) or _SAYS_FOLDER.search(found.label):
        return Volatile("working_directory", "a working directory")
    return None


def _label_of(found: TextDifference, value: str) -> str:
    """Return the words in front of a value that differs, in its line."""
    line = found.label
    inside = next((n for n in range(min(len(value), len(line)), 0, -1) if line.endswith(value[:n])), 0)
    return line[: len(line) - inside][-48:]


def _id_label(label: str) -> str | None:
    """Return the id that the words right before a value name; None: none."""
    return next((what for what, pattern in _ID_LABELS if pattern.search(label)), None)


def _is_opaque(value: str) -> bool:
    """Return True if a word looks machine-made: many digits among letters, or changes of case inside."""
    parts = re.split(r"[_\-.:#]", value)
    for part in parts:
        digits = sum(char.isdigit() for char in part)
        if len(part) >= 6 and digits >= 2 and len(part) - digits >= 2:
            return True
    changes = len(re.findall(r"[a-z][A-Z]", value))
    return (
        len(parts) >= 3 and len(value) >= 16 and all(re.fullmatch(r"[0-9a-f]{4,}", p) for p in parts)
    ) or (len(value) >= 10 and changes >= 3)


#: Words that ids themselves begin with.
_OWN_LABEL = re.compile(
    r"(?:req|request|sess|session|run|trace|thread|conv|msg|chatcmpl|call|job|task|txn|evt|usr|user|org)[_-]",
    re.I,
)
_SAYS_ID = re.compile(r"(?:[\s_-]id|uuid|guid|nonce|trace)[\s:=\"'`]*\Z", re.I)


def _labelled_id(found: TextDifference) -> Volatile | None:
    """Name a value with digits after words such as `session` or `request id`; a UUID wherever it stands."""
    values = _matches(_UUID, found)
    if values:
        return Volatile("id", _id_label(_label_of(found, values[0])) or "a UUID")
    values = _matches(_OPAQUE, found)
    if not values:
        return None
    label = _label_of(found, values[0])
    own = [_OWN_LABEL.match(value) for value in values]
    if not all(any(char.isdigit() for char in value) for value in values):
        return Volatile("id", _id_label(label) or "an id") if _SAYS_ID.search(label) else None
    what = _id_label(label) or ("an id" if all(own) else None)
    if what is None or (what == "an id" and min(map(len, values)) < 4):
        return None
    return None if any(_matches(pattern, found) for _, pattern in _TIMES) else Volatile("id", what)


def _opaque_id(found: TextDifference) -> Volatile | None:
    values = _matches(_OPAQUE, found)
    if not values or not all(map(_is_opaque, values)):
        return None
    is_colour = all(map(_COLOUR.fullmatch, values)) and _label_of(found, values[1]).endswith("#")
    return None if is_colour else Volatile("id", "an id")


def _time(found: TextDifference) -> Volatile | None:
    for what, pattern in _TIMES:
        if _matches(pattern, found):
            return Volatile("timestamp", what)
    if _matches(_YEAR, found) and _SAYS_YEAR.search(found.label):
        return Volatile("timestamp", "a date")
    if _matches(_EPOCH, found):
        return Volatile("timestamp", "a timestamp")
    written = [_written_date(*side) for side in found.sides()]
    return Volatile("timestamp", _what_is_written(*written)) if all(written) else None


def _what_is_written(*dates: str) -> str:
    return "a timestamp" if any(re.search(r"\d:\d", date) for date in dates) else "a date"


def kind_at(before: str, after: str) -> str | None:
    """Name the kind of text in which a text is cut, or that begins there, as `a date`; None: nothing special.

    For a place that is known in one text only; of two texts `volatile_text` knows more. O(1).
    """
    if not after:
        return None
    head = before[-_CONTEXT:]
    text, cut = head + after[:_CONTEXT], len(head)
    begin = cut + after[0].isspace()  # a token may begin with a blank

    def at_cut(pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.finditer(text)
        return next((match for match in found if match.start() <= begin and match.end() > cut), None)

    if at_cut(_UUID):
        return "an id"
    for what, pattern in (*_TIMES, ("a timestamp", _EPOCH)):
        if at_cut(pattern):
            return what
    date = _written_date(text, begin, begin + 1)
    if date:
        return _what_is_written(date)
    word = at_cut(_OPAQUE)
    if word is not None and _is_id(word[0], text[: word.start()]):
        return "an id"
    return "a number" if at_cut(_NUMBER) else None


def _is_id(word: str, before: str) -> bool:
    if _COLOUR.fullmatch(word) and before.endswith("#"):
        return False
    is_labelled = _OWN_LABEL.match(word) or (len(word) >= 4 and _id_label(before))
    return _is_opaque(word) or bool(is_labelled and any(char.isdigit() for char in word))


_WORDS = re.compile(
    r"\d+|(?:星期|周|週)[一二三四五六日天]|[月火水木金土日]曜日?|"
    r"[^\W\d_\u3040-\u30ff\u3400-\u9fff]+(?:-feira)?|[\s\S]"
)
_CJK_WEEKDAY = re.compile(r"(?:星期|周|週).|.曜日?")


def _written_date(text: str, start: int, end: int) -> str:
    """Return the written date around a difference, as `Sunday, 22 November 2026`; empty: there is none."""
    words = [(match.start(), match.end(), match[0]) for match in _WORDS.finditer(text)]
    first = next((at for at, (_, stop, _) in enumerate(words) if stop > start), len(words) - 1)
    last = next((at for at in range(len(words) - 1, -1, -1) if words[at][0] < max(end, start + 1)), first)
    if not words or not all(_is_of_date(word) for _, _, word in words[first : last + 1]):
        return ""
    while first > 0 and _is_of_date(words[first - 1][2]):
        first -= 1
    while last + 1 < len(words) and _is_of_date(words[last + 1][2]):
        last += 1
    inside = [word.lower() for _, _, word in words[first : last + 1]]
    named = any(word in _DATE_NAMES or _CJK_WEEKDAY.fullmatch(word) for word in inside)
    named = named or re.search(r"\d ?[年월月일日]", text[words[first][0] : words[last][1]]) is not None
    numbered = any(word.isdigit() for word in inside)
    is_weekday = any(word in _WEEKDAYS and len(word) > 3 for word in inside)
    return text[words[first][0] : words[last][1]] if named and (numbered or is_weekday) else ""


def _is_of_date(word: str) -> bool:
    lower = word.lower()
    if lower in _DATE_NAMES or lower in _DATE_FILLER or _CJK_WEEKDAY.fullmatch(lower):
        return True
    if word.isdigit():
        return len(word) <= 4
    return word != "\n" and _SEPARATORS.fullmatch(word) is not None


_OF_A_PERSON = re.compile(
    r"user|account|customer|client|owner|author|login|logged|signed|sender|my e?-?mail", re.I
)
_OF_A_THING = re.compile(
    r"(?:project|product|company|tool|model|file|repo\w*|app\w*|service|branch|host|server|team|bot|"
    r"assistant|agent|"
    r"package|module|class|function|variable|table|database|brand|event|game|book|course)[ "
    r"_-]?(?:name|named|called)\W*\Z"
    r"|(?:your name|you are (?:named|called)|call yourself)\W*(?:is)?\W*\Z",
    re.I,
)
_MANY = re.compile(
    r"\A[ -]?(?:users|developers|customers|people|teams?|engineers|students|clients|writers|teachers|apps?|"
    r"applications?|code|projects?|questions?|speakers|programmers|documents|companies|language)\b",
    re.I,
)
_NO_NAMES = frozenset(
    """
    english german french spanish italian portuguese dutch polish russian chinese japanese korean arabic
    hindi turkish swedish american british canadian indian mexican brazilian european deutsch englisch español
    français italiano
    """.split()  # noqa: SIM905
)


def _user(found: TextDifference) -> Volatile | None:
    addressed = _OF_A_PERSON.search(found.label) is not None
    if addressed and (_matches(_EMAIL, found) or _matches(_HANDLE, found)):
        return Volatile("user_name", "a user's name")
    for pattern in (_NAME, _LOGIN):
        if _named(pattern, found):
            return Volatile("user_name", "a user's name")
    return None


_LOGIN_BEFORE = re.compile(
    r"(?:user(?:[ _-]?name)?|login|account|(?:logged|signed)[ -]in as|benutzername|usuario)"
    r"(?:is|:|=|`|\"|'|[ \t])*\Z",
    re.I,
)


def _named(pattern: re.Pattern[str], found: TextDifference) -> bool:
    """Return True if both texts have a name there, and words around it that speak of a person."""
    return all(
        any(
            _is_named(text, *place, is_login=pattern is _LOGIN)
            for place in _candidates(pattern, text, start, end)
        )
        for text, start, end in found.sides()
    )


def _candidates(pattern: re.Pattern[str], text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of names around the difference."""
    if pattern.fullmatch(text, start, end):
        yield start, end
    for match in pattern.finditer(text):
        if _covers(match, start, end) and start < end:
            yield match.span()
            # A title or a greeting may have been taken for its first word.
            head = match[0].partition(" ")[0]
            if match.start() + len(head) < start:
                yield match.start() + len(head) + 1, match.end()


def _is_named(text: str, start: int, end: int, *, is_login: bool) -> bool:
    before, after = text[:start].rpartition("\n")[2], text[end:]
    if text[start:end].lower() in _NO_NAMES or _OF_A_THING.search(before) or _MANY.match(after):
        return False
    if is_login:
        return _LOGIN_BEFORE.search(before) is not None
    return _NAME_BEFORE.search(before) is not None or _NAME_AFTER.match(after) is not None
