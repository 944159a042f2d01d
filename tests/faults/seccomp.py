"""Let a system call of this process fail from now on, by a filter in the kernel: a real error from a real call."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

_NUMBERS = {"x86_64": {"fsync": 74, "fdatasync": 75}, "aarch64": {"fsync": 82, "fdatasync": 83}}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
_TSYNC = 1  # for every thread that runs already, too


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def let_syncing_fail() -> None:
    """From now on every fsync and fdatasync of this process returns EIO."""
    machine = platform.machine()
    numbers = list(_NUMBERS[machine].values())
    code = [struct.pack("<HBBI", _LOAD, 0, 0, 0)]
    for place, number in enumerate(numbers):
        code.append(struct.pack("<HBBI", _JUMP_EQUAL, len(numbers) - place, 0, number))
    code.append(struct.pack("<HBBI", _RETURN, 0, 0, _ALLOW))
    code.append(struct.pack("<HBBI", _RETURN, 0, 0, _ERRNO | errno.EIO))
    blob = ctypes.create_string_buffer(b"".join(code))
    program = _Program(len(code), ctypes.cast(blob, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if libc.syscall(_SYS_SECCOMP[machine], 1, _TSYNC, ctypes.byref(program)) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")
