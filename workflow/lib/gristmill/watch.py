"""`gristmill watch`: a running campaign as its telemetry tells it, group by group."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gristmill.layout import Layout
from gristmill.limits import spent_by
from gristmill.telemetry import Snapshot, duration, is_stale, last_snapshots

_POLL_S = 2.0
_MOST_ROWS = 20


@dataclass(frozen=True)
class Campaign:
    """What is known of a campaign at a moment. rows: of each group, by its name; done: groups with their answers."""

    name: str
    rows: dict[str, int]
    done: set[str]
    attempts: list[tuple[str, Snapshot]]


def look(name: str, rows: dict[str, int], layout: Layout) -> Campaign:
    """Read what there is; a few small reads for each attempt."""
    done = {group for group in rows if (layout.answers / group).is_dir()}
    return Campaign(name, rows, done, list(last_snapshots(layout.telemetry)))


def view(campaign: Campaign, now: float) -> RenderableType:
    """The campaign as a table: a line for each group's newest attempt, those that run first."""
    newest: dict[str, Snapshot] = {}
    for _, seen in campaign.attempts:
        if seen.group not in newest or seen.at > newest[seen.group].at:
            newest[seen.group] = seen
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("group", "state", "answered", "per s", "tokens/s", "in flight", "engine", "left", "not ok"):
        table.add_column(heading, justify="left" if heading in ("group", "state", "engine") else "right")
    order = sorted(newest, key=lambda group: (_state(campaign, group, newest[group], now) != "running", group))
    for group in order[:_MOST_ROWS]:
        seen = newest[group]
        state = _state(campaign, group, seen, now)
        running = state == "running"
        table.add_row(
            group,
            Text(state, style={"running": "green", "done": "dim"}.get(state, "yellow")),
            f"{_answered(campaign, group, seen):,}/{seen.rows:,}",
            f"{seen.rate:.1f}" if running else "",
            f"{seen.tokens_per_s:,.0f}" if running else "",
            f"{seen.in_flight}/{seen.limit}" if running else "",
            _engine(seen) if running else "",
            duration(seen.eta_s) if running and seen.eta_s is not None else "",
            f"{sum(n for outcome, n in seen.outcomes.items() if outcome != 'ok'):,}",
        )
    parts: list[RenderableType] = [_summary(campaign, newest, now), table]
    if len(order) > _MOST_ROWS:
        parts.append(Text(f"and {len(order) - _MOST_ROWS} more groups", style="dim"))
    troubles = [(group, seen) for group, seen in newest.items() if seen.trouble and now - seen.at < 60]
    parts += [Text(f"{group}: {seen.trouble}", style="yellow", overflow="ellipsis") for group, seen in troubles[:3]]
    return Group(*parts)


def _state(campaign: Campaign, group: str, seen: Snapshot, now: float) -> str:
    if group in campaign.done:
        return "done"
    if is_stale(seen, now):
        return "silent"
    if seen.ended:
        return "ended"
    return "running" if seen.bound != "nobody" else "paused"


def _answered(campaign: Campaign, group: str, seen: Snapshot) -> int:
    return seen.rows if group in campaign.done else seen.rows - seen.total + seen.answered


def _engine(seen: Snapshot) -> str:
    if seen.running is None:
        return ""
    kv = f", KV {seen.kv_use:.0%}" if seen.kv_use is not None else ""
    return f"{seen.running:.0f} run, {seen.waiting or 0:.0f} wait{kv}"


def _summary(campaign: Campaign, newest: dict[str, Snapshot], now: float) -> RenderableType:
    total = sum(campaign.rows.values())
    answered = sum(_answered(campaign, group, seen) for group, seen in newest.items())
    answered += sum(campaign.rows[group] for group in campaign.done - newest.keys())
    live = [seen for group, seen in newest.items() if _state(campaign, group, seen, now) in ("running", "paused")]
    rate = sum(seen.rate for seen in live)
    spent = spent_by(seen for _, seen in campaign.attempts)
    line = (
        f"{campaign.name}: {answered:,} of {total:,} rows, {len(campaign.done)} of {len(campaign.rows)} groups done, "
    )
    line += f"{len(live)} at work, {rate:.1f}/s"
    if rate > 0 and answered < total:
        line += f", {duration((total - answered) / rate)} left at this rate"
    costs = f"{spent.requests:,} requests sent, {spent.tokens:,} tokens"
    if spent.gpu_hours:
        costs += f", {spent.gpu_hours:.2f} GPU-hours"
    return Group(
        Text(line, style="bold"), ProgressBar(total=max(total, 1), completed=answered), Text(costs, style="dim")
    )


def is_over(campaign: Campaign) -> bool:
    """Whether every group has its answers."""
    return campaign.rows.keys() <= campaign.done


def watch(see: Callable[[], Campaign], once: bool, console: Console | None = None) -> None:
    """Show a campaign until all of its groups are done, or once. Ctrl-C ends it; nothing else does."""
    console = console or Console()
    if once or not console.is_terminal:
        console.print(view(see(), time.time()))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            campaign = see()
            live.update(view(campaign, time.time()), refresh=True)
            if is_over(campaign):
                return
            time.sleep(_POLL_S)
