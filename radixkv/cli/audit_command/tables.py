# SPDX-License-Identifier: Apache-2.0
"""A report on a terminal: how much was found, where prompts break, and what to move."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from radixkv.observe.audit.record import Json
from radixkv.text.safe_text import printable

_SHOWN_GROUPS = 8
_SHOWN_CHARS = 160
_BARS = " ▁▂▃▄▅▆▇█"
_FAULTS = {
    "prompt": "the prompt changed",
    "time": "it came after what was cached had run out",
    "room": "what was cached had to make room",
    "client": "it was not asked to be cached, or came too early",
    "provider": "the prefix was steady and within its time, yet not read: the provider",
    "unknown": "unknown: the log does not tell the times",
}


def print_report(console: Console, report: Json) -> None:
    """Print a report; see `AuditReport.to_dict`."""
    total = report["summary"]
    console.print(
        f"{total['requests']:,} requests, {total['prompt_tokens']:,} prompt tokens "
        f"({_counted(report)}), {report['bytes'] / 1e6:,.1f} MB in {report['seconds']:.1f} s",
        highlight=False,
    )
    _problems(console, report)
    _rates(console, report)
    _faults(console, report)
    _growth(console, report)
    for name in ("model", "key", "conversation"):
        _groups(console, report, name)
    _worst(console, report)


def _counted(report: Json) -> str:
    if report["tokens_are"] == "exact":
        return "counted by the model's tokenizer"
    if report["tokens_are"] == "bytes":
        return "one for each byte of its text"
    num_reported = report["summary"]["requests_with_usage"]
    return (
        "estimated from characters, in proportion to the usage that the log tells"
        if num_reported
        else "estimated from characters; the log tells no usage"
    )


def _problems(console: Console, report: Json) -> None:
    broken = report["broken"]
    if broken["count"]:
        console.print(f"[yellow]{broken['count']:,} could not be read[/]", highlight=False)
        for line in broken["first"][:5]:
            console.print(f"  {_text(line)}", highlight=False, soft_wrap=True)
    for count, what in (
        (report["failed_requests"], "requests failed and are not counted"),
        (
            report["counted_otherwise"] if report["tokens_are"] == "exact" else 0,
            "answers count other tokens than the prompts have: another model, or parts are not in the log",
        ),
        (report["forgotten"], "prompts may have had more to find than --memory could hold"),
    ):
        if count:
            console.print(f"{count:,} {what}", highlight=False)


def _rates(console: Console, report: Json) -> None:
    total, money = report["summary"], report["money"]
    table = Table(show_header=True)
    table.add_column("")
    for column in ("hit rate", "tokens read", *(["money"] if money else [])):
        table.add_column(column, justify="right")
    rows = (
        ("that was", "hit_rate", "reported_cached_tokens", "reported"),
        (f"that the rules of {report['rules']} give", "rules_hit_rate", "predicted_cached_tokens", "rules"),
        ("that the best order of the same content gives", "best_hit_rate", "best_tokens", "best"),
    )
    for what, rate_name, tokens_name, key in rows:
        rate, tokens = total[rate_name], total[tokens_name]
        cells = [what, "not told" if rate is None else f"{rate:.1%}", "" if tokens is None else f"{tokens:,}"]
        table.add_row(*cells, *([_money(money[key], money)] if money else []))
    console.print(table)
    if money:
        missing = money["models_without_price"]
        console.print(
            f"Prices of {_text(money['date'])}."
            + (f" No price is known of {_text(', '.join(missing[:5]))}." if missing else ""),
            highlight=False,
        )


def _money(amount: float | None, money: Json) -> str:
    """Return an amount to the cent, or a small one to two digits; None: no price is known.

    >>> [_money(amount, {"currency": "USD"}) for amount in (1234.5, 0.00312, None)]
    ['1,234.50 USD', '0.0031 USD', 'not known']
    """
    if amount is None:
        return "not known"
    if amount and abs(amount) < 0.1:
        return f"{float(f'{amount:.1e}'):.10f}".rstrip("0") + f" {money['currency']}"
    return f"{amount:,.2f} {money['currency']}"


def _faults(console: Console, report: Json) -> None:
    shown = [(name, found) for name, found in report["faults"].items() if name in _FAULTS and found["tokens"]]
    if not shown:
        return
    table = Table(title="Why tokens were not read", title_justify="left")
    table.add_column("")
    table.add_column("requests", justify="right")
    table.add_column("tokens", justify="right")
    for name, found in sorted(shown, key=lambda item: -item[1]["tokens"]):
        table.add_row(_FAULTS[name], f"{found['requests']:,}", f"{found['tokens']:,}")
    console.print(table)


def _growth(console: Console, report: Json) -> None:
    points = report["growth"]
    if len(points) < 4:
        return
    step = -(-len(points) // 60)
    for name, what in (("hit_rate", "was"), ("rules_hit_rate", "rules")):
        rates = [point[name] for point in points]
        if any(rate is not None for rate in rates):
            bar = "".join(_bar(rates[at : at + step]) for at in range(0, len(rates), step))
            console.print(f"hit rate over time, {what:>5}  {bar}", highlight=False)


def _bar(rates: list[float | None]) -> str:
    known = [rate for rate in rates if rate is not None]
    return _BARS[min(8, round(8 * sum(known) / len(known)))] if known else " "


def _groups(console: Console, report: Json, name: str) -> None:
    groups = report[f"by_{name}"]
    if len(groups) < 2:
        return
    table = Table(title=f"By {name}", title_justify="left")
    for column in (name, "requests", "prompt tokens", "was", "rules", "best"):
        table.add_column(column, justify="left" if column == name else "right")
    for group in groups[:_SHOWN_GROUPS]:
        rates = [group[key] for key in ("hit_rate", "rules_hit_rate", "best_hit_rate")]
        table.add_row(
            _text(str(group[name])[:40]),
            f"{group['requests']:,}",
            f"{group['prompt_tokens']:,}",
            *("" if rate is None else f"{rate:.1%}" for rate in rates),
        )
    if len(groups) > _SHOWN_GROUPS:
        table.caption = f"and {len(groups) - _SHOWN_GROUPS:,} more"
    console.print(table)


def _worst(console: Console, report: Json) -> None:
    for number, found in enumerate(report["worst"], start=1):
        example = found["example"]
        cost = [f"{found['lost_tokens']:,} tokens"]
        if found["lost_seconds"] is not None:
            cost.append(f"{found['lost_seconds']:,.1f} s")
        if found["lost_money"] is not None:
            cost.append(_money(found["lost_money"], report["money"]))
        where = f" in {found['where']}" if found["where"] else ""
        console.print(
            f"\n[bold]{number}. {_text(found['what'][:1].upper() + found['what'][1:])}{_text(where)}[/]: "
            f"{', '.join(cost)} in {found['requests']:,} requests",
            highlight=False,
        )
        if example.get("earlier"):
            console.print(f"   {_text(example['place'])} after {_text(example['earlier'])}", highlight=False)
        if example["old"] or example["new"]:
            table = Table(show_header=True, expand=True)
            table.add_column("earlier prompt", ratio=1, overflow="fold")
            table.add_column("this prompt", ratio=1, overflow="fold")
            before = example["before"][-60:]
            table.add_row(_side(before, example["old"]), _side(before, example["new"]))
            console.print(table)
        if example["what_to_move"]:
            console.print(f"   What to do: {_text(example['what_to_move'])}", highlight=False)


def _side(before: str, after: str) -> Text:
    return Text.assemble((printable(before), "dim"), (printable(after[:_SHOWN_CHARS]), "bold"))


def _text(text: str) -> str:
    """Return a recorded text without what acts on a terminal or as markup."""
    return escape(printable(text))
