"""`zbus sim run`: runs scenarios with many seeds, and shrinks and prints what fails."""

from __future__ import annotations

import json as json_module
import os
import shlex
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import typer

import zbus
from zbus.cli.options import JsonOption
from zbus.cli.render.output import encode_json, note, progress, write
from zbus.errors import ConfigInvalid
from zbus.util.atomic_file import write_atomically

from .timeline import timeline

SHRUNK_FAILURES = 3  # more are only listed
SHOWN_LINES = 60


def run(
    scenario: Annotated[Path, typer.Argument(help="Python file with @zbus.sim.scenario() functions, or TOML file.")],
    seeds: Annotated[
        str, typer.Option(metavar="N|A:B", help="Number of seeds, or a range: 100:200 runs seeds 100 to 199.")
    ] = "100",
    seed: Annotated[list[int] | None, typer.Option(metavar="SEED", help="Run this seed only; may be repeated.")] = None,
    jobs: Annotated[int, typer.Option(min=1, max=256, metavar="N", help="Number of processes.")] = 1,
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Run this scenario of the file only.")] = None,
    show: Annotated[
        int | None, typer.Option(metavar="SEED", help="Print the timeline of one seed, a column for each node.")
    ] = None,
    frames: Annotated[bool, typer.Option(help="With --show: include every frame on the network.")] = False,
    shrunk: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Run with fewer faults and smaller choices, as a failure printed."),
    ] = None,
    shrink: Annotated[bool, typer.Option(help="Search the smallest run that fails in the same way.")] = True,
    sqlite: Annotated[
        bool, typer.Option("--sqlite", help="Put real SQLite logs below the simulated ones, and compare them. Slower.")
    ] = False,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Begin no more seeds once one has failed.")] = False,
    resume: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what was run to this file, and continue from it.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run scenarios with many seeds. Exit code 1 if an invariant was broken."""
    from zbus.sim.scenarios.runner import Result, run_file, run_seed
    from zbus.sim.scenarios.scenario import load_scenarios
    from zbus.sim.world import Logs, Overrides

    logs: Logs = "sqlite" if sqlite else "simulated"
    found = load_scenarios(scenario)
    if only:
        unknown = [name for name in only if name not in [each.name for each in found]]
        if unknown:
            names = ", ".join(each.name for each in found)
            raise ConfigInvalid("only", f"{scenario} has no scenario {unknown[0]!r}; it has: {names}")
        found = [each for each in found if each.name in only]
    overrides = None if shrunk is None else Overrides.parse(shrunk)
    if show is not None:
        for each in found:
            result, trace = run_seed(each, show, overrides, keep_trace=True)
            write(timeline(each.name, result, trace, frames).encode())
        return
    if overrides is not None:
        if not seed:
            raise ConfigInvalid("shrunk", "give --seed as well, as the failure printed")
        work: list[tuple[Any, list[int]]] = [(each, list(seed)) for each in found]
    else:
        first, end = _range(seeds)
        work = [(each, list(seed) if seed else list(each.seeds(first, end))) for each in found]
    fingerprint = _fingerprint(scenario) if resume is not None else ""
    before = _resumed(resume, fingerprint)
    work = [(each, [one for one in chosen if one not in before.get(each.name, ())]) for each, chosen in work]
    report = _Report(scenario, json)
    total = sum(len(chosen) for _, chosen in work)
    with progress("seeds") as bar:
        task = bar.add_task("simulating", total=total)

        def finished(results: list[Result]) -> None:
            for result in results:
                known = {each.name: each.known_failure for each, _ in work}[result.scenario]
                report.add(result, known)
                if not result.failed or known:  # a seed that failed is run again
                    before.setdefault(result.scenario, set()).add(result.seed)
            bar.update(task, advance=len(results), description=f"simulating, {len(report.failed)} failed")
            _note_resumed(resume, fingerprint, before)

        try:
            if overrides is not None:
                for each, chosen in work:
                    finished([run_seed(each, one, overrides, logs=logs)[0] for one in chosen])
            else:
                named = [(each.name, chosen) for each, chosen in work]
                run_file(scenario, named, jobs, finished, lambda: fail_fast and bool(report.failed), logs)
        except KeyboardInterrupt:
            report.interrupted = True
    report.write_summary()
    for result in () if report.interrupted else report.failed[:SHRUNK_FAILURES]:
        (one,) = [each for each, _ in work if each.name == result.scenario]
        report.explain(one, result, overrides, shrink and overrides is None)
    for result in report.failed[SHRUNK_FAILURES:]:
        note(f"FAILED {result.scenario}, seed {result.seed}: {result.violations[0]}")
    if report.interrupted:
        note("zbus: interrupted; the summary has the seeds that were run")
        raise typer.Exit(1)
    if report.failed or report.not_failed:
        raise typer.Exit(1)


class _Report:
    """The results so far."""

    def __init__(self, path: Path, json: bool) -> None:
        self._path, self._json = path, json
        self.failed: list[Any] = []
        self.interrupted = False
        self.known: dict[str, bool] = {}  # scenarios that are marked as known failures, and whether they failed
        self._seeds = self._events = 0
        self._virtual_s = self._node_s = self._real_s = 0.0
        self._faults: Counter[str] = Counter()
        self._frames: Counter[str] = Counter()
        self._delivered: Counter[str] = Counter()  # by scenario

    @property
    def not_failed(self) -> list[str]:
        """The scenarios that are marked as known failures and did not fail."""
        if self.interrupted:
            return []
        return [name for name, failed in self.known.items() if not failed]

    def add(self, result: Any, known: str) -> None:
        self._seeds += 1
        self._events += result.events
        self._delivered[result.scenario] += result.events
        self._virtual_s += result.virtual_s
        self._node_s += result.node_s
        self._real_s += result.real_s
        self._faults.update(result.faults)
        self._frames.update(result.frames)
        if known:
            self.known[result.scenario] = self.known.get(result.scenario, False) or result.failed
        elif result.failed:
            self.failed.append(result)

    def write_summary(self) -> None:
        per_s = self._node_s / self._real_s if self._real_s else 0.0
        summary = {
            "seeds": self._seeds,
            "failed": len(self.failed),
            "known_failures": len(self.known),
            "virtual_hours": round(self._virtual_s / 3600, 3),
            "node_hours": round(self._node_s / 3600, 3),
            "node_seconds_per_second": round(per_s),
            "events_delivered": self._events,
            "faults": dict(sorted(self._faults.items())),
            "frames": dict(sorted(self._frames.items())),
        }
        if self._json:
            write(encode_json(summary))
            return
        lines = [
            f"{self._seeds:,} seeds, {len(self.failed):,} failed, {len(self.known):,} known failures",
            f"simulated: {summary['virtual_hours']} hours, {summary['node_hours']} node-hours, "
            f"{per_s:,.0f} node-seconds per second and process",
            f"events delivered: {self._events:,}",
            f"faults: {_counts(self._faults) or 'none'}",
            f"frames: {_counts(self._frames)}",
        ]
        write("".join(f"{line}\n" for line in lines).encode())
        for name in [name for name, events in self._delivered.items() if not events]:
            note(f"zbus: no event was delivered in {name}: it proves nothing about events")
        for each in self.not_failed:
            note(f"zbus: {each} is marked as a known failure, and no seed failed: remove the mark")

    def explain(self, scenario: Any, result: Any, overrides: Any, shrinks: bool) -> None:
        """Print a failure: what is broken, the smallest run, and the command that repeats it."""
        from zbus.sim.scenarios.runner import run_seed
        from zbus.sim.scenarios.shrink import shrink

        note(f"\nFAILED {result.scenario}, seed {result.seed}:")
        for violation in result.violations[:5]:
            note(f"  {violation}")
        if shrinks:
            with progress("runs") as bar:
                task = bar.add_task("shrinking", total=None)
                smallest = shrink(scenario, result, progress=lambda runs: bar.update(task, completed=runs))
            overrides = smallest.overrides
            choices = "".join(f", {name}={number}" for name, number in smallest.result.choices.items())
            kept = len(overrides.faults or ())
            note(f"shrunk in {smallest.runs} runs from {result.planned} faults to {kept}{choices}:")
        again, trace = run_seed(scenario, result.seed, overrides, keep_trace=True)
        for violation in again.violations[:5] if shrinks else ():
            note(f"  {violation}")
        note("the run:")
        for line in _essential(trace):
            note(f"  {line}")
        command = ["zbus", "sim", "run", os.fspath(self._path), "--only", result.scenario, "--seed", str(result.seed)]
        if overrides is not None:
            command += ["--shrunk", str(overrides)]
        note(f"repeat it:    {shlex.join(command)}")
        command[6:8] = ["--show", str(result.seed)]
        note(f"see all of it: {shlex.join(command)}")


def _essential(trace: Any) -> list[str]:
    """Return the lines of a trace that explain it: faults, processes, gaps and broken invariants."""
    kinds = {"fault", "healed", "mended", "started", "stopped", "killed", "frozen", "thawed", "gap", "broken", "lagged"}
    kinds |= {"connected", "subscribed", "converged", "injected"}
    lines = [str(step) for step in trace.steps if step.kind in kinds]
    if len(lines) > SHOWN_LINES:
        half = SHOWN_LINES // 2
        return [*lines[:half], f"… {len(lines) - SHOWN_LINES} lines …", *lines[-half:]]
    return lines


def _range(seeds: str) -> tuple[int, int]:
    first, colon, end = seeds.partition(":")
    try:
        numbers = (int(first), int(end)) if colon else (0, int(first))
    except ValueError:
        numbers = (1, 0)
    if not 0 <= numbers[0] < numbers[1]:
        raise ConfigInvalid("seeds", f"{seeds!r} must be a number, or a range such as 100:200")
    return numbers


def _resumed(path: Path | None, fingerprint: str) -> dict[str, set[int]]:
    """Return the seeds that were run before, by scenario. If the code has changed since, the result is empty."""
    if path is None or not path.exists():
        return {}
    try:
        found = json_module.loads(path.read_text())
        if found["code"] != fingerprint:
            note(f"zbus: the code has changed since {path} was written: all seeds are run again")
            return {}
        return {name: set(map(int, seeds)) for name, seeds in found["done"].items()}
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise ConfigInvalid("resume", f"{path} was not written by this command: {error!r}") from error


def _note_resumed(path: Path | None, fingerprint: str, done: dict[str, set[int]]) -> None:
    if path is not None:
        found = {"code": fingerprint, "done": {name: sorted(seeds) for name, seeds in done.items()}}
        write_atomically(path, json_module.dumps(found).encode(), path.with_name(f".{path.name}.new"))


def _fingerprint(scenario: Path) -> str:
    """Return a hash of the code that is simulated, and of the scenario."""
    found = blake2b(digest_size=16)
    for file in [*sorted(Path(zbus.__file__).parent.rglob("*.py")), scenario]:
        found.update(file.read_bytes())
    return found.hexdigest()


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{kind} {number:,}" for kind, number in sorted(counts.items()))
