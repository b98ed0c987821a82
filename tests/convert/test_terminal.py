"""Progress: bars with rates and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import os
import pty
import re
import select
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from convert.terminal import RateColumn, reporter
from tests.runs import TARGETS, Zygote, invoke, project


def test_a_rate_is_steps_a_second_or_seconds_a_step() -> None:
    now = 0.0
    progress = Progress(RateColumn(), get_time=lambda: now, console=Console(file=io.StringIO()))
    fast, slow = progress.add_task("fast", total=100), progress.add_task("slow", total=100)
    column = progress.columns[0]
    assert isinstance(column, RateColumn)
    assert column.render(progress.tasks[0]).plain == ""
    for step in range(1, 5):
        now = float(step)
        progress.update(fast, completed=5 * step)
        progress.update(slow, completed=step // 2)
    assert column.render(progress.tasks[0]).plain == "5.0/s"
    assert re.fullmatch(r"\d\.\d s each", column.render(progress.tasks[1]).plain)


def test_elsewhere_a_step_is_one_plain_line() -> None:
    stream = io.StringIO()
    with reporter(Console(file=stream, width=200)) as show:
        for done in range(4):
            show("gptq: weights", done, 3)
        show("hashes", 0, 1)
        show.say("a line [of] 3 words")
    assert stream.getvalue() == "gptq: weights (3 steps)\nhashes\na line [of] 3 words\n"


def test_a_terminal_sees_bars_with_rates_and_the_time_left(zygote: Zygote, tmp_path: Path) -> None:
    yaml = project(tmp_path / "p", targets=[TARGETS[2] | {"method": "rtn"}])
    leader, follower = pty.openpty()
    shown = {"TERM": "xterm-256color", "COLUMNS": "120", "FORCE_COLOR": "1"}
    zygote.start("run", yaml, terminal=os.ttyname(follower), **shown)
    parts = []
    with ThreadPoolExecutor(1) as threads:
        ended = threads.submit(zygote.wait)
        while not ended.done() or select.select([leader], [], [], 0)[0]:
            if select.select([leader], [], [], 0.05)[0]:
                parts.append(os.read(leader, 65536))
    os.close(follower)
    os.close(leader)
    assert ended.result().returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(parts).decode())
    for what in ("tiny: calibrate", "reference: weights", "reference: greedy", "tiny: logits", "tiny: engine's logits"):
        assert re.search(rf"{what} +━+ +\d+/\d+ .*(/s|s each) .*\d+:\d\d:\d\d left \d+:\d\d:\d\d", text), what


def test_json_is_all_that_machines_read(tmp_path: Path) -> None:
    import json

    yaml = project(tmp_path / "p", targets=[TARGETS[2] | {"method": "rtn"}])
    for name in ("run", "nightly", "validate"):
        result = invoke(name, yaml, "--json")
        assert result.exit_code == 0, result.output
        assert [target["name"] for target in json.loads(result.stdout)["targets"]] == ["tiny"]
    assert len(json.loads(invoke("history", yaml, "--json").stdout)) == 3
