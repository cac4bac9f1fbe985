# SPDX-License-Identifier: Apache-2.0
"""Times, ids, folders and names are known by their form and the words around them; other words are not."""

from __future__ import annotations

import pytest

from radixkv.observe.text_difference import differences
from radixkv.observe.volatile_text import kind_at, volatile_text

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
        (
            "Current date and time: Saturday, 21 November 2026, 14:33 CET",
            "Current date and time: Sunday, 22 November 2026, 08:01 CET",
        ),
        ("time=1700000000.123", "time=1700009911.5"),
        ("Datum: 21.11.2026", "Datum: 22.11.2026"),
        ("The time is 14:33.", "The time is 09:12."),
        ("2026-11-21T14:33Z", "2026-11-21T15:40Z"),
        ("Nov 21", "Nov 22"),
        ("21-Nov-2026", "22-Dec-2026"),
        ("It is November 2026", "It is December 2026"),
        ("Today is Saturday.", "Today is Sunday."),
        ("Current year: 2025", "Current year: 2026"),
        ("Timestamp 1700000000123", "Timestamp 1700000555123"),
        ("date 20261121", "date 20261122"),
        ("11/21/26 2:33pm", "11/21/26 3:34pm"),
        ("Date: 2026.11.21", "Date: 2026.12.01"),
        ("the 21st of November", "the 22nd of November"),
        ("Knowledge as of Friday the 13th", "Knowledge as of Monday the 2nd"),
        ("현재 시간: 14시 33분", "현재 시간: 15시 02분"),
        ("2026년 11월 21일", "2026년 11월 22일"),
        ("Dziś jest 21 listopada 2026", "Dziś jest 22 listopada 2026"),
        ("Hoje é 21 de novembro de 2026", "Hoje é 3 de dezembro de 2026"),
        ("now: 2026-11-21 14:33:00+01:00", "now: 2026-11-21 14:35:10+01:00"),
        ("Time: 14h33m", "Time: 15h01m"),
        ("Bugün 21 Kasım 2026", "Bugün 22 Kasım 2026"),
        ("आज 21 नवंबर 2026", "आज 22 नवंबर 2026"),
        ("It is 21.09.2026.", "It is 22.09.2026."),
        ("Hoje é 21/09/2026.", "Hoje é 30/09/2026."),
        ("[2026/02/09 09:52:00] start", "[2026/03/14 00:58:41] start"),
        ("Date 09/21/2026, 4:15 PM", "Date 11/30/2026, 9:55 AM"),
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
        ("uuid: 7F3C1C9A-11D3-4B2A-8888-123456789ABC", "uuid: 9AD31C9A-22D3-4B2A-9999-AAAAAAAAAABC"),
        ("{7f3c1c9a-11d3-4b2a-8888-123456789abc}", "{9ad31c9a-22d3-4b2a-9999-aaaaaaaaaabc}"),
        ("session V1StGXR8_Z5jdHi6B-myT", "session Uakgb_J5m9g-0JDMbcJqL"),
        ("ksuid 0ujtsYcgvSTl8PAuAdqWYSMnLOv", "ksuid 0ujzPyRiIAffKhBux4PvQdDqMHY"),
        ("req-1a2b", "req-3c4d"),
        (
            "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "traceparent: 00-aaf92f3577b34da6a3ce929d0e0e4736-11f067aa0ba902b7-01",
        ),
        ("ptr 0x7ffe12ab", "ptr 0x7ffe99cd"),
        ("cf-ray: 8a1b2c3d4e5f-FRA", "cf-ray: 9f8e7d6c5b4a-AMS"),
        ("Session-ID: sess_abcdefgh", "Session-ID: sess_zyxwvuts"),
        ("request_id = 98123", "request_id = 98124"),
        ("Message ID: <CAF4x9@mail.example>", "Message ID: <CBZ7y1@mail.example>"),
        ("chatcmpl-AbC123xyz9", "chatcmpl-ZzY987qwe1"),
        ("id=66f1a2b3c4d5e6f7a8b9c0d1", "id=66f1a2b3c4d5e6f7a8b9c0ff"),
        ("Correlation: 3f9c-77aa-10be", "Correlation: 91bd-02ce-88fa"),
        ("run_id: 2026-harbor-0007", "run_id: 2026-harbor-0012"),
        ("Session: blue-otter-42", "Session: red-panda-17"),
        ("Vorgangsnummer: V-1513214", "Vorgangsnummer: V-1374502"),
        ("pid 12345", "pid 23456"),
        ("Transaction: tx_9Kd82", "Transaction: tx_1Ma77"),
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
        ("Working dir: /app/service-a", "Working dir: /app/service-b"),
        ("CWD: /home/u1", "CWD: /home/u2"),
        ("PWD=/tmp/x1", "PWD=/tmp/y2"),
        ("workdir `/srv/a`", "workdir `/srv/b`"),
        ("Repository root: /Users/a/b c/d", "Repository root: /Users/z/q"),
        ("cwd: \\\\server\\share\\a", "cwd: \\\\server\\share\\b"),
        ("The project is at ~/x", "The project is at ~/y"),
        ("directory: src/module_a", "directory: src/module_b"),
        ("file:///home/a/x", "file:///home/b/x"),
        ("Current folder: C:/Users/a", "Current folder: D:/b"),
        ("You are working in /app/a.", "You are working in /app/b."),
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
        ('username: "ann.smith"', 'username: "bob"'),
        ("L'utilisateur s'appelle Ines Duarte.", "L'utilisateur s'appelle Ravi."),
        ("Der Nutzer heißt Jörg.", "Der Nutzer heißt Ines Duarte."),
        ("用户名：Lars", "用户名：Ravi"),
        ("Kullanıcı: Mehmet", "Kullanıcı: Ayşe"),
        ("Good morning, Ann!", "Good morning, Bob!"),
        ("Speaking with Dr. Chen about", "Speaking with Ms. Okafor about"),
        ("The current user is Priya Patel (admin).", "The current user is Tom O'Neil (admin)."),
        ("ユーザー: 田中さん", "ユーザー: 佐藤さん"),
        ("Usuario: Juan Pérez", "Usuario: Ana Gómez"),
        ("The user's name is Alice.", "The user's name is Bob."),
        ("User: alice", "User: bob"),
        ("You are assisting customer John Doe (ID 42)", "You are assisting customer Jane Roe (ID 42)"),
        ("for user Bob", "for user Carol"),
        ("Name: Carol", "Name: Dan"),
        ("username=alice", "username=bob"),
        ("Welcome back, Dave!", "Welcome back, Erin!"),
        ("You're chatting with Eve", "You're chatting with Frank"),
        ("This is Frank's workspace", "This is Grace's workspace"),
        ("assistant for Grace Hopper", "assistant for Alan Turing"),
        ("Your user, Heidi, is", "Your user, Ivan, is"),
        ("Employee: Ivan Ivanov", "Employee: Judy Garland"),
        ("Utilisateur : Jean Dupont", "Utilisateur : Marie Curie"),
        ("利用者: 山田太郎", "利用者: 鈴木花子"),
        ("Owner: judy@example.com", "Owner: mallory@example.org"),
        ("The customer is called Niaj.", "The customer is called Olivia."),
        ("<user>Peggy</user>", "<user>Rupert</user>"),
        ('user_name: "Sybil"', 'user_name: "Trent"'),
        ("You work for Victor.", "You work for Walter."),
        ("Address the user as Wendy.", "Address the user as Xavier."),
        ("My name is Yolanda.", "My name is Zach."),
        ("Пользователь: Иван", "Пользователь: Мария"),
        ("사용자: 김철수", "사용자: 이영희"),
        ("المستخدم: أحمد", "المستخدم: ليلى"),
        ("You are Alice's assistant", "You are Bob's assistant"),
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
        ("The colour is #ff8800", "The colour is #00ff88"),
    ],
)
def test_what_is_not_known_has_no_name(one: str, other: str) -> None:
    assert kind_of(one, other) is None


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("It is 2026-11-21 09:", "15:07.", "a timestamp"),
        ("Today is", " 2026-11-21.", "a date"),
        ("Heute ist der ", "22. November 2026.", "a date"),
        ("Сегодня ", "22 ноября 2026 г.", "a date"),
        ("今天是2026年11月", "22日", "a date"),
        ("Il est ", "16h41.", "a time"),
        ("Now: 2026112", "2T164154Z", "a timestamp"),
        ("Session ", "7f3c1c9a-11d3-4b2a-8888-123456789abc", "an id"),
        ("Session: blue-", "otter-42", "an id"),
        ("Visit ", "110 of yours", "a number"),
        ("For ", "Ann.", None),
        ("Answer in ", "March style", None),
        ("May ", "I enter?", None),
        ("It is 09:15", "", None),
        ("The colour is #", "ff8800", None),
    ],
)
def test_the_kind_of_text_at_a_cut(before: str, after: str, kind: str | None) -> None:
    assert kind_at(before, after) == kind


def test_a_date_alone_is_no_timestamp() -> None:
    for one, other in (("2026-11-21", "2026-11-22"), ("2026-11-21", "2026-12-21")):
        found = volatile_text(differences(RULES.format(one), RULES.format(other))[0])
        assert found is not None
        assert (found.kind, found.what) == ("timestamp", "a date")
