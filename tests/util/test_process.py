"""A stored process id is compared with the process that has it now."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from zbus.util.process import boot_id, is_alive, is_running, pid_namespace, started_at


def test_this_process_is_alive_and_another_start_time_is_another_process() -> None:
    started = started_at(os.getpid())

    assert started > 0
    assert is_alive(os.getpid())
    assert is_alive(os.getpid(), started)
    assert not is_alive(os.getpid(), started + 1)


def test_a_process_that_ended_is_not_alive_even_before_it_is_collected() -> None:
    child = subprocess.Popen([sys.executable, "-c", "print(flush=True)"], stdout=subprocess.PIPE)
    started = started_at(child.pid)
    assert child.stdout is not None
    child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nothing has collected it

    assert is_running(child.pid)
    assert not is_alive(child.pid)
    assert not is_alive(child.pid, started)

    child.communicate()
    assert not is_running(child.pid)
    assert started_at(child.pid) == 0


def test_the_boot_and_the_pid_namespace_are_those_of_the_kernel() -> None:
    assert boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert pid_namespace().startswith("pid:[")
