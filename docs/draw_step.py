"""Draws docs/step.svg, the life of one step: ``python docs/draw_step.py``."""

from __future__ import annotations

from html import escape
from pathlib import Path

STAGES = [
    (
        "1 intake",
        "commands become sequences in State.waiting",
        "reset_cache · predict_output · admit · release",
        "allocator may refuse",
    ),
    ("2 look", "state, clock, prefix match → View", "plan_idle · triage · cached_tokens", "idle, admission"),
    ("3 plan", "View → Plan of Chunks, most wanted first", "plan_step", "scheduler"),
    ("4 reserve", "Plan → a Lease each, or a Shortfall", "reserve", "allocator"),
    ("5 relieve", "Shortfall → newcomers leave, then Evictions", "plan_idle · choose_victims · release", "preemption"),
    ("6 pack", "Plan + Leases → Batch of int32 arrays", "", "core"),
    ("7 move", "swaps and copies, in the order decided", "", "executor"),
    ("8 forward", "Batch → logits of the sampled rows", "", "kernel, model"),
    ("9 sample", "logits → tokens; a function of (seed, branch, position)", "", "executor"),
    (
        "10 commit",
        "text, stops, sharing, forks, releases, report",
        "external_waste · commit · fork · release · observers",
        "core",
    ),
]
PLUGIN, CORE, DEVICE = "#2563eb", "#475569", "#0f766e"
COLOUR = {
    "scheduler": PLUGIN,
    "allocator": PLUGIN,
    "preemption": PLUGIN,
    "idle, admission": PLUGIN,
    "allocator may refuse": PLUGIN,
    "core": CORE,
}
W, TOP, ROW, BOX = 860, 64, 58, 44


def text(
    x: float, y: float, words: str, size: int = 14, colour: str = "#0f172a", weight: str = "400", anchor: str = "start"
) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" font-weight="{weight}" text-anchor="{anchor}">{escape(words)}</text>'


def draw() -> str:
    height = TOP + ROW * len(STAGES) + 30
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {W} {height}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{W}" height="{height}" fill="#ffffff"/>',
        text(24, 30, "One step: what each stage takes and gives, which hooks it calls, who decides", 17, weight="700"),
        text(24, 50, "blue: a plugin decides   ·   grey: core acts   ·   green: the device", 12, CORE),
    ]
    for i, (name, what, hooks, who) in enumerate(STAGES):
        y = TOP + i * ROW
        colour = COLOUR.get(who, DEVICE)
        out.append(
            f'<rect x="70" y="{y}" width="{W - 100}" height="{BOX}" rx="7" fill="{colour}" fill-opacity="0.08" stroke="{colour}"/>'
        )
        out.append(text(84, y + 27, name, 15, colour, "700"))
        out.append(text(194, y + (20 if hooks else 27), what, 13))
        if hooks:
            out.append(text(194, y + 37, hooks, 12, CORE))
        out.append(text(W - 44, y + 27, who, 13, colour, "700", "end"))
        if i < len(STAGES) - 1:
            out.append(f'<path d="M 450 {y + BOX} v {ROW - BOX}" stroke="#94a3b8" marker-end="url(#tip)"/>')
    four, five = TOP + 3 * ROW, TOP + 4 * ROW
    out.append(
        f'<path d="M 70 {five + 22} h -22 v {four - five} h 18" fill="none" stroke="{PLUGIN}" marker-end="url(#tip)"/>'
    )
    out.append(
        f'<text transform="translate(40 {five + 14}) rotate(-90)" font-size="11" fill="{PLUGIN}">until it fits</text>'
    )
    tip = '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    out.append(f'{tip}<path d="M 0 0 L 8 4 L 0 8 z" fill="#64748b"/></marker></defs></svg>')
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "step.svg").write_text(draw())
