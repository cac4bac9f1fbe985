"""Times, ids, folders and names are known by their form and the words around them; other words are not."""

from __future__ import annotations

import pytest

from radixkv.insight.text_difference import differences
from radixkv.insight.volatile_text import volatile_text

RULES = "You are the agent of a harbour.\n{}\nCount the ships every evening."


def kind_of(one: str, other: str) -> str | None:
    found = volatile_text(differences(RULES.format(one), RULES.format(other))[0])
    return None if found is None else found.kind


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Today is 2026-11-21 09:15:07.", "Today is 2026-11-22 10:17:30."),
        ("It is Sunday, November 22, 2026.", "It is Monday, November 23, 2026."),
        ("Heute ist Sonntag, der 22. November 2026.", "Heute ist Montag, der 3. Mai 2027."),
        ("Current time: 4:05 PM", "Current time: 11:59 AM"),
        ("今天是2026年11月22日，星期日。", "今天是2026年11月23日，星期一。"),
        ("Aujourd'hui: 22 novembre 2026", "Aujourd'hui: 1er décembre 2026"),
        ("timestamp=1763800000", "timestamp=1763812345"),
        ("Now: 20261122T164154Z", "Now: 20261123T010203Z"),
        ("Sun, 22 Nov 2026 16:41:54 GMT", "Mon, 23 Nov 2026 01:02:03 GMT"),
        ("Сегодня 22 ноября 2026 г.", "Сегодня 3 декабря 2026 г."),
        ("今日は2026/11/22です", "今日は2026/11/23です"),
        ("Il est 16h41.", "Il est 17h02."),
        ("Now (UTC): 2026-11-22T16:41:54.123456+00:00", "Now (UTC): 2026-11-22T16:42:01.000001+00:00"),
    ],
)
def test_times(one: str, other: str) -> None:
    assert kind_of(one, other) == "timestamp"
    assert kind_of(other, one) == "timestamp"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Session: 7f3c1c9a-11d3-4b2a-8888-123456789abc", "Session: 9ad31c9a-22d3-4b2a-9999-aaaaaaaaaabc"),
        ("Request ID: req_011CUx7Ab", "Request ID: req_02ZZp9Qk"),
        ("Trace 01ARZ3NDEKTSV4RRFFQ69G5FAV here", "Trace 01BX5ZZKBKACTAV9WVGQZZZZZZ here"),
        ("Ticket ABC-1234 is open", "Ticket XYZ-9876 is open"),
        ("hash deadbeef01", "hash c0ffee22ab"),
        ("Conversation 4711", "Conversation 4812"),
        ("conversation_id=ab12", "conversation_id=cd34"),
        ("nonce: Zk3J9qLmPw", "nonce: aB4kT0xYzR"),
        ("request number 17", "request number 18"),
    ],
)
def test_ids(one: str, other: str) -> None:
    assert kind_of(one, other) == "id"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Working directory: /home/ann/proj", "Working directory: /srv/bob/other/x"),
        ("cwd: C:\\Users\\ann\\proj", "cwd: D:\\work\\bob\\x"),
        ("/home/ann/proj is the cwd", "/home/bob/proj is the cwd"),
        ("root at ~/src/app", "root at ~/code/site"),
        ("Workspace: /workspaces/7f3c1c9a-11d3-4b2a-8888-123456789abc", "Workspace: /workspaces/other"),
    ],
)
def test_folders(one: str, other: str) -> None:
    assert kind_of(one, other) == "working_directory"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("You are helping Ann Smith today.", "You are helping Bob today."),
        ("User: ann42", "User: bob7"),
        ("Hello María José!", "Hello Li!"),
        ("用户：张伟。请", "用户：李娜。请"),
        ("Kunde: Jörg Müller", "Kunde: Anna Ök"),
        ("user email: a@b.com", "user email: zed@c.org"),
        ("Ann's personal assistant.", "Bob's personal assistant."),
        ("logged in as asmith", "logged in as bjones"),
        ("Speaking with Dr. Chen about", "Speaking with Ms. Okafor about"),
        ("The current user is Priya Patel (admin).", "The current user is Tom O'Neil (admin)."),
        ("ユーザー: 田中さん", "ユーザー: 佐藤さん"),
        ("Usuario: Juan Pérez", "Usuario: Ana Gómez"),
    ],
)
def test_names(one: str, other: str) -> None:
    assert kind_of(one, other) == "user_name"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Answer in French.", "Answer in German."),
        ("Be brief.", "Be polite."),
        ("Use Python 3.11 for code", "Use Python 3.12 for code"),
        ("Version 2.1.3", "Version 2.2.0"),
        ("You have 17 tools.", "You have 18 tools."),
        ("Deploy to Paris now", "Deploy to London now"),
        ("Project name: Apollo", "Project name: Hermes"),
        ("call 3 tools at most", "call 4 tools at most"),
        ("Task 3: sort", "Task 4: sort"),
        ("powered by claude-sonnet-4-5.", "powered by claude-opus-4-6."),
        ("helping Windows users", "helping Linux users"),
        ("The user is French", "The user is German"),
        ("Supports Python", "Supports Rust"),
        ("Sessions last 30 minutes", "Sessions last 45 minutes"),
        ("Port 8080 is open", "Port 9090 is open"),
        ("Your name is Max.", "Your name is Eva."),
        ("the API at /v1/chat", "the API at /v2/chat"),
        ("See https://a.com/x/y", "See https://b.org/z/w"),
        ("price 12.99 EUR", "price 13.49 EUR"),
        ("ratio 3:2 is best", "ratio 16:9 is best"),
        ("Contact support at help@a.com", "Contact support at desk@b.org"),
        ("Temperature 22.5 degrees", "Temperature 17.3 degrees"),
        ("Reply within 3 sentences", "Reply within 4 sentences"),
        ("Answer in March style", "Answer in May style"),
    ],
)
def test_what_is_not_known_has_no_name(one: str, other: str) -> None:
    assert kind_of(one, other) is None
